"""Response formats beside tools whose calls have no marker: an answer must not read like a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.tool_call_grammars import format_named

from moiety_platform.inference.calls_or_answers import ambiguity_of
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_wire.grammars import GrammarKind, GrammarSpec

OFFER = ToolOffer((Tool("look", "", {"type": "object"}),))
TEXT: dict[str, Any] = {"type": "string"}


def objects(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    found = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return found | more


TOLD_APART = [
    objects({"a": TEXT}),
    objects({"name": TEXT, "age": {"type": "integer"}}, "name", "age"),
    objects({"name": {"enum": ["Ada", "Bo"]}, "parameters": {"type": "object"}}, "name"),
    objects({"name": {"type": "integer"}, "arguments": {}}),
    objects({"age": TEXT, "name": TEXT, "arguments": {"type": "object"}}, "age", "name"),
    objects({"name": TEXT, "parameters": TEXT}, "name", "parameters"),
    {"anyOf": [objects({"a": TEXT}), {"type": "null"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": objects({"a": TEXT})}},
    {"allOf": [{"type": "object"}, objects({"a": TEXT})]},
    {"enum": [{"a": 1}, "look"]},
    TEXT,
]
LIKE_CALLS = [
    {"type": "object"},
    {},
    objects({"name": TEXT}),
    objects({"name": TEXT, "age": TEXT}, "name"),
    objects({"name": {"const": "look"}, "age": TEXT}),
    objects({"name": TEXT, "arguments": {"type": "object"}, "age": TEXT}, "name", "age"),
    objects({"tool_name": TEXT}, "tool_name"),
    objects({"a": TEXT}, "a", additionalProperties=TEXT) | {"properties": {"id": TEXT}, "required": []},
    {"anyOf": [objects({"a": TEXT}), objects({"name": TEXT})]},
    {"$ref": "#/$defs/a", "$defs": {"a": objects({"name": TEXT})}},
    {"enum": [{"name": "look"}]},
]


def why(name: str, schema: Any) -> str:
    answer = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return ambiguity_of(answer, format_named(name), OFFER, ())


@pytest.mark.parametrize("schema", TOLD_APART)
def test_objects_that_are_no_calls_stand_beside_tools(schema: Any) -> None:
    assert why("llama", schema) == ""
    assert why("json_list", {"type": "array", "items": {**schema, **{"$defs": {}}}}) == "" or "$defs" in schema


@pytest.mark.parametrize("schema", LIKE_CALLS)
def test_objects_that_may_be_calls_do_not(schema: Any) -> None:
    assert "could be read as a call" in why("llama", schema)
    assert why("llama4_pythonic", schema) == "" and why("hermes", schema) == ""
    if "$defs" not in schema:
        assert "could be read as a call" in why("json_list", {"type": "array", "items": schema})
        assert why("json_list", {"type": "array", "prefixItems": [TEXT], "items": schema}) == ""


def test_any_object_stands_beside_calls_in_a_list_or_in_python_only() -> None:
    anything = GrammarSpec(GrammarKind.JSON_OBJECT)
    for name, is_apart in (("llama", False), ("json_list", True), ("llama4_pythonic", True), ("hermes", True)):
        assert (ambiguity_of(anything, format_named(name), OFFER, ()) == "") is is_apart


@pytest.mark.parametrize("name", ["llama", "json_list", "llama4_pythonic", "hermes"])
def test_choices_stand_beside_tools_unless_they_read_like_a_call(name: str) -> None:
    way = format_named(name)
    call = {"llama4_pythonic": "[look()]", "json_list": '[{"name": "look", "arguments": {}}]'}.get(
        name, way.opener + '{"name": "look", "arguments": {}}'
    )
    for choices, is_apart in ((["yes", "no"], True), (["yes", call], False)):
        spec = GrammarSpec(GrammarKind.CHOICE, json.dumps(choices))
        assert (ambiguity_of(spec, way, OFFER, ()) == "") is is_apart
    assert "only JSON and choices" in ambiguity_of(GrammarSpec(GrammarKind.REGEX, ".*"), way, OFFER, ())

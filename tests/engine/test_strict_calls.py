"""Strict calls of every tool format keep to their schemas: random schemas, and calls near what a schema allows."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from tests.tool_call_grammars import FORMATS, GrammarText, format_named, with_added_tokens

from moiety_engine.scripted.text_model import END_ID
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.harmony import CONTROL_TOKENS
from moiety_text.harmony.reader import HarmonyReader
from moiety_text.tools.deltas import Call
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_wire.grammars import GrammarKind, GrammarSpec, HarmonyGrammar, ToolCallGrammar

NUM_SCHEMAS = 120 if os.environ.get("MOIETY_TEST_ALL") else 16
TOO_LARGE = re.compile(r"\d[eE]\+?\d{3}")  # numbers without bounds may be too large for a double
NOTED = {"gemma4": "members", "minimax_m3": "elements", "lfm2": "keywords", "llama4_pythonic": "keywords"}
MARK, QUOTE = "]<]minimax[>[", '<|"|>'

LOOKUP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "note": {"type": ["string", "null"]},
        "mode": {"enum": ["fast", "a/b <c", None]},
        "code": {"anyOf": [{"type": "string", "pattern": "^([a-z]|/)+$", "maxLength": 5}, {"type": "null"}]},
        "id": {"type": "string", "format": "uuid"},
        "count": {"type": "integer", "minimum": 1},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 2},
        "free": {"type": "object"},
    },
    "required": ["query", "count"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "parts": {"type": "array", "items": {"$ref": "#/$defs/place"}}},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}
UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
GOOD: list[dict[str, Any]] = [
    {"query": "x", "count": 1},
    {"query": "né </b> {\n\n", "note": "yes", "mode": "a/b <c", "code": "a/b", "id": UUID, "count": 20},
    {"query": "", "mode": None, "code": None, "count": 3, "flag": True},
    {"query": "5", "count": 3, "flag": None, "places": [{"city": "B", "parts": [{"city": "C", "parts": []}]}]},
    {"query": "x", "count": 3, "places": [{"city": ""}, {"city": "true"}], "free": {"a": 1}},
]
BAD: list[dict[str, Any]] = [
    {"count": 1},
    {"query": 5, "count": 1},
    {"query": "x", "count": 0},
    {"query": "x", "count": 1.5},
    {"query": "x", "mode": "slow", "count": 1},
    {"query": "x", "code": "A", "count": 1},
    {"query": "x", "code": "abcdef", "count": 1},
    {"query": "x", "id": "1", "count": 1},
    {"query": "x", "count": 1, "flag": "maybe"},
    {"query": "x", "count": 1, "places": []},
    {"query": "x", "count": 1, "places": [{"city": "a"}, {"city": "b"}, {"city": "c"}]},
    {"query": "x", "count": 1, "places": [{"parts": []}]},
    {"query": "x", "count": 1, "places": [{"city": "a", "more": "b"}]},
    {"query": "x", "count": 1, "places": [{"city": "a", "parts": [{"city": 1}]}]},
    {"query": "x", "count": 1, "more": "z"},
]


@pytest.fixture(scope="module")
def text() -> GrammarText:
    return GrammarText(with_added_tokens(special=True))


@pytest.fixture(scope="module")
def schemas() -> list[dict[str, Any]]:
    """Schemas of objects, drawn at random; each has many of the keywords."""
    namespace: dict[str, Any] = {"__name__": "schemas"}
    exec((Path(__file__).parents[2] / "benchmarks" / "schemas.py").read_text(), namespace)
    maker = namespace["SchemaMaker"](random.randrange(10**9) if os.environ.get("MOIETY_TEST_ALL") else 29)
    made = (maker.make() for _ in range(10 * NUM_SCHEMAS))
    return [schema for schema in made if schema.get("type") == "object"][:NUM_SCHEMAS]


@pytest.fixture(scope="module")
def unmarked() -> GrammarText:
    """A tokenizer without tokens for markers."""
    return GrammarText(with_added_tokens(special=True, contents=("<other>",)))


@pytest.mark.parametrize("name", NOTED)
def test_random_calls_are_valid_also_where_no_token_marks_their_parts(
    unmarked: GrammarText, schemas: list[dict[str, Any]], name: str
) -> None:
    check_random_calls(unmarked, schemas, name)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMATS)
def test_random_calls_of_a_grammar_are_read_and_valid_by_their_schema(
    text: GrammarText, schemas: list[dict[str, Any]], name: str
) -> None:
    check_random_calls(text, schemas, name)


def check_random_calls(text: GrammarText, schemas: list[dict[str, Any]], name: str) -> None:
    way, num_valid, num_refused = format_named(name), 0, 0
    for seed, schema in enumerate(schemas):
        offer = ToolOffer((Tool("f", "", schema, strict=True),), must_call=True, parallel=False)
        try:
            answer = text.walker.draw_answer(text.grammar(name, offer), random.Random(seed))
        except GrammarRefused as exc:
            assert "/" in str(exc), "the refusal names the place in the schema"
            num_refused += 1
            continue
        if answer is not None and TOO_LARGE.search(text.decode(answer)) is None:
            (call,) = way.new_reader(offer, is_rest=False).read(text.decode(answer))
            assert isinstance(call, Call), call
            jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(call.arguments))
            num_valid += 1
    if way.parameters is None:
        assert num_refused == 0
    assert num_valid >= len(schemas) // (2 if way.parameters is None else 4)


def test_random_calls_of_the_harmony_format_are_read_and_valid_by_their_schema(schemas: list[dict[str, Any]]) -> None:
    text = GrammarText(with_added_tokens(special=True, contents=CONTROL_TOKENS))
    control = {token: text.ids[token] for token in CONTROL_TOKENS}
    num_valid = 0
    for seed, schema in enumerate(schemas):
        tools = [ToolCallGrammar("f", json.dumps(schema))]
        form = HarmonyGrammar(control, tools, must_call=True, banned_ids=[END_ID])
        spec = GrammarSpec(GrammarKind.HARMONY, msgspec.json.encode(form).decode())
        begun = [control["<|channel|>"], *b"commentary to=functions.f", control["<|message|>"]]
        answer = text.walker.draw_answer(spec, random.Random(seed), begun)
        if answer is not None and TOO_LARGE.search(text.decode(answer)) is None:
            (call,) = HarmonyReader(frozenset(["f"])).read(text.decode(answer))
            assert isinstance(call, Call), call
            jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(call.arguments))
            num_valid += 1
    assert num_valid >= len(schemas) // 2


def _member(value: Any) -> str:
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_member(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_member, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _element(name: str, value: Any) -> str:
    if isinstance(value, dict) and name != "free":
        inner = "".join(_element(key, one) for key, one in value.items()) + MARK
    elif isinstance(value, list):
        inner = "".join(_element("item", one) for one in value) + MARK
    else:
        inner = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) + MARK
    return f"{MARK}<{name}>{inner}</{name}>"


def _keyword(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


WRITTEN: dict[str, Callable[[dict[str, Any]], str]] = {
    "members": lambda arguments: ",".join(f"{key}:{_member(value)}" for key, value in arguments.items()),
    "elements": lambda arguments: "".join(_element(key, value) for key, value in arguments.items()),
    "keywords": lambda arguments: ", ".join(f"{key}={_keyword(value)}" for key, value in arguments.items()),
}


def _call(name: str, arguments: dict[str, Any]) -> str:
    way = format_named(name)
    return f"{way.to_name}lookup{way.to_arguments}{WRITTEN[NOTED[name]](arguments)}{way.to_end}{way.closer}"


def _is_allowed(text: GrammarText, name: str, tools: tuple[Tool, ...], told: str) -> bool:
    matcher = text.compiler.compile(text.grammar(name, ToolOffer(tools)))
    ids = text.spell(told, format_named(name))
    return matcher.validate_tokens(ids) == len(ids) and (matcher.consume_tokens(ids) and matcher.is_accepting())


@pytest.mark.parametrize("name", NOTED)
def test_strict_calls_in_a_notation_of_their_own_are_those_of_their_schema(text: GrammarText, name: str) -> None:
    way, tool = format_named(name), Tool("lookup", "", LOOKUP, strict=True)
    validator = jsonschema_rs.validator_for(LOOKUP, validate_formats=True)
    for arguments in GOOD:
        told = _call(name, arguments)
        (call,) = way.new_reader(ToolOffer((tool,)), is_rest=False).read(told)
        assert isinstance(call, Call) and json.loads(call.arguments) == arguments
        assert validator.is_valid(arguments) and _is_allowed(text, name, (tool,), told), arguments
    for arguments in BAD:
        if name == "minimax_m3" and arguments.get("query") == 5:
            continue  # text is not quoted there, so that 5 is the text
        if name == "minimax_m3" and any("parts" in place for place in arguments.get("places", [])):
            continue
        assert not validator.is_valid(arguments)
        assert not _is_allowed(text, name, (tool,), _call(name, arguments)), arguments


@pytest.mark.parametrize("name", NOTED)
def test_a_tool_that_is_not_strict_takes_any_arguments_in_its_notation(text: GrammarText, name: str) -> None:
    way, loose = format_named(name), Tool("lookup", "", {"type": "object"})
    tools = (loose, Tool("other", "", LOOKUP, strict=True))
    arguments = {"any": "text", "more": {"deep": ["x", {"a": "b"}]}, "flag": True}
    told = _call(name, arguments)
    (call,) = way.new_reader(ToolOffer(tools), is_rest=False).read(told)
    assert isinstance(call, Call) and _is_allowed(text, name, tools, told)


def test_an_id_stands_between_the_name_and_the_arguments_where_the_template_has_it(text: GrammarText) -> None:
    name, tool = "mistral with ids", Tool("lookup", "", LOOKUP, strict=True)
    assert _is_allowed(text, name, (tool,), '[TOOL_CALLS]lookup[CALL_ID]abcDEF123[ARGS]{"query": "x", "count": 1}')
    for broken in ("[CALL_ID]abc[ARGS]", "[ARGS]", "[CALL_ID]abcDEF123"):
        assert not _is_allowed(text, name, (tool,), f'[TOOL_CALLS]lookup{broken}{{"query": "x", "count": 1}}')


@pytest.mark.parametrize(
    ("name", "schema", "told"),
    [
        ("gemma4", {"a": {"type": "array", "uniqueItems": True}}, "/properties/a/uniqueItems: the keyword"),
        ("gemma4", {"a": {"items": {"enum": [QUOTE]}, "type": "array"}}, "/properties/a/items/enum: '<|\"|>' contains"),
        ("gemma4", {"a": {"anyOf": [{"type": "object", "required": ["b"]}]}}, "/properties/a/anyOf/0/required: 'b' is"),
        ("gemma4", {"a": {"oneOf": [{"type": "string"}, {"enum": ["x"]}]}}, "/properties/a/oneOf: its alternatives"),
        ("gemma4", {"a": {"$ref": "#/$defs/none"}}, "/properties/a/$ref: '#/$defs/none' does not exist"),
        ("gemma4", {"a": {"type": "number", "multipleOf": 0}}, "in the parameters of the tool 'f', /properties/a"),
        ("minimax_m3", {"a": {"type": ["string", "integer"], "maxLength": 3}}, "/properties/a/maxLength: the keyword"),
        ("minimax_m3", {"a>": {"type": "string"}}, "/properties/a>: the name cannot be written"),
        ("lfm2", {"a b": {"type": "string"}}, "/properties/a b: the name cannot be written"),
        ("lfm2", {"a": {"type": "integer", "not": {}}}, "in the parameter 'a' of the tool 'f', /not: "),
        ("lfm2", {"a": {"$ref": "#/$defs/b"}}, "in the parameter 'a' of the tool 'f', "),
        ("glm45", {"a": {"oneOf": [{"type": "string"}, {"enum": ["x"]}]}}, "/properties/a/oneOf: its alternatives"),
    ],
)
def test_a_schema_that_a_notation_cannot_keep_is_refused_with_its_place(
    text: GrammarText, name: str, schema: dict[str, Any], told: str
) -> None:
    tool = Tool("f", "", {"type": "object", "properties": schema}, strict=True)
    with pytest.raises(GrammarRefused) as refused:
        text.compiler.compile(text.grammar(name, ToolOffer((tool,))))
    assert told in str(refused.value)


@pytest.mark.parametrize("name", ["glm45", "gemma4", "lfm2", "minimax_m3"])
def test_a_schema_for_any_other_property_is_not_taken_for_any_value(text: GrammarText, name: str) -> None:
    tool = Tool("f", "", {"type": "object", "additionalProperties": {"type": "integer"}}, strict=True)
    with pytest.raises(GrammarRefused, match="/additionalProperties: the keyword"):
        text.compiler.compile(text.grammar(name, ToolOffer((tool,))))


FRACTIONS = {"type": "object", "properties": {"a": {"enum": ["auto", 0.5, 2.0]}}, "required": ["a"]}
NUMBERS = {"type": "object", "properties": {"a": {"type": "number", "enum": [0.5, 1, 2]}}, "required": ["a"]}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("schema", [FRACTIONS, NUMBERS])
def test_listed_fractions_are_written_as_numbers(text: GrammarText, name: str, schema: dict[str, Any]) -> None:
    offer = ToolOffer((Tool("f", "", schema, strict=True),), must_call=True, parallel=False)
    grammar, found = text.grammar(name, offer), set()
    for seed in range(24):
        answer = text.walker.draw_answer(grammar, random.Random(seed))
        if answer is not None:
            (call,) = format_named(name).new_reader(offer, is_rest=False).read(text.decode(answer))
            assert isinstance(call, Call), call
            found.add(json.loads(call.arguments)["a"])
    assert 0.5 in found and found <= set(schema["properties"]["a"]["enum"])


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2", "seed_oss"])
def test_a_string_with_limits_may_have_the_first_character_of_the_tag_that_ends_it(
    text: GrammarText, name: str
) -> None:
    limits = {"type": "string", "minLength": 3, "maxLength": 5}
    schema = {"type": "object", "properties": {"a": limits}, "required": ["a"], "additionalProperties": False}
    tool, way = Tool("f", "", schema, strict=True), format_named(name)
    tags = way.parameters
    assert tags is not None
    for value, is_allowed in (("a<b", True), ("</p<", True), ("a<", False), ("a<bcd<", False)):
        inner = f"{tags.to_name}a{tags.to_value}{tags.padding}{value}{tags.padding}{tags.end}{tags.between}"
        told = f"{way.to_name}f{way.to_arguments}{inner}{way.to_end}{way.closer}"
        assert _is_allowed(text, name, (tool,), told) == is_allowed, told


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_free_to_call_is_text_or_text_before_calls_of_the_schema(text: GrammarText, name: str) -> None:
    number, flag = {"type": "integer", "minimum": 3, "maximum": 40}, {"type": "boolean"}
    schema = {
        "type": "object",
        "properties": {"n": number, "b": flag},
        "required": ["n", "b"],
        "additionalProperties": False,
    }
    way, offer, num_calls = format_named(name), ToolOffer((Tool("f", "", schema, strict=True),)), 0
    grammar = text.grammar(name, offer)
    plain = [*b"It is 3 degrees.", END_ID]
    assert text.compiler.compile(grammar).validate_tokens(plain) == len(plain)
    for before in ("", "I look it up. ") if way.opener else ("",):
        begun = text.spell(f"{before}{way.to_name}f", way)
        for seed in range(5):
            answer = text.walker.draw_answer(grammar, random.Random(seed), begun)
            if answer is None:
                continue
            parts = way.new_reader(offer, is_rest=False).read(text.decode(answer))
            calls = [part for part in parts if isinstance(part, Call)]
            for call in calls:
                jsonschema_rs.validator_for(schema).validate(json.loads(call.arguments))
            assert calls and text.decode(answer).startswith(before), parts
            num_calls += len(calls)
    assert num_calls > 0

"""A grammar accepts only documents that are valid under its schema. Other schemas are refused with the position."""

from __future__ import annotations

import json
import os
import random
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tests.conftest import examples
from tests.grammar_walks import GrammarWalker
from tests.schema_oracle import complaint, write_json

from moiety_engine.scripted.text_model import END_ID, scripted_text_model
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_schemas import exact_schema_of
from moiety_engine.structured_outputs.grammar_tokenizer import GrammarTokenizer
from moiety_wire.grammars import GrammarKind, GrammarSpec, ToolCallGrammar, ToolCallsGrammar

from .random_schemas import (
    FORMATS,
    documents_near,
    leaf_schemas,
    schemas,
    tree_schemas,
    values,
    with_definitions,
    written,
)

TEXT = scripted_text_model()  # whose tokens are bytes
THOROUGH = bool(os.environ.get("MOIETY_TEST_ALL"))  # draw other schemas in each run
COMPILER = GrammarCompiler(TEXT.tokenizer_json, TEXT.eos_token_ids)
WALKER = GrammarWalker(COMPILER, GrammarTokenizer(TEXT.tokenizer_json, TEXT.eos_token_ids).tokens, TEXT.eos_token_ids)


def schema_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else write_json(schema))


def lets_through(matcher: LLMatcher, document: str) -> bool:
    tokens = [*document.encode(), END_ID]
    return matcher.validate_tokens(tokens) == len(tokens)


def allows(schema: Any, document: str) -> bool:
    return lets_through(COMPILER.compile(schema_spec(schema)), document)


def refusal(schema: Any) -> str:
    with pytest.raises(GrammarRefused) as refused:
        COMPILER.compile(schema_spec(schema))
    return str(refused.value)


@settings(max_examples=examples(250), deadline=None, derandomize=not THOROUGH)
@given(schemas, st.integers(0, 2**32))
@example('{"type": "number", "minimum": 0, "multipleOf": 0.1, "exclusiveMaximum": 1, "exclusiveMinimum": 0}', 11)
@example('{"type": "number", "multipleOf": 0.1, "maximum": 1, "allOf": [{"minimum": 0}, {"exclusiveMinimum": 0}]}', 11)
def test_every_text_that_a_schemas_grammar_accepts_is_valid(schema: str, seed: int) -> None:
    try:
        matcher = COMPILER.compile(schema_spec(schema))
    except GrammarRefused as exc:
        assert str(exc)
        return
    draw = random.Random(seed)
    answers = [WALKER.draw_answer(schema_spec(schema), draw, hurry_after=after) for after in (10, 60)]
    drawn = [bytes(answer).decode() for answer in answers if answer is not None]
    for document in drawn:
        assert complaint(schema, document) == "", document
    for document in documents_near(schema, drawn, draw):
        if lets_through(matcher, document):
            assert complaint(schema, document) == "", document


@settings(max_examples=examples(60), deadline=None, derandomize=not THOROUGH)
@given(tree_schemas, leaf_schemas, st.integers(0, 2**32))
def test_schemas_in_grammars_and_of_tools_are_kept_alike(tree: Any, leaf: Any, seed: int) -> None:
    schema = with_definitions((tree, leaf, tree))
    form = ToolCallsGrammar(
        [ToolCallGrammar("f", schema)], "", '{"name": "', '", "a":', "}", "", "", {}, True, True, False
    )
    calls = GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode())
    for grammar, end in ((GrammarSpec(GrammarKind.GRAMMAR, f'start: "" %json {schema} "!"\n'), "!"), (calls, "}")):
        try:
            answer = WALKER.draw_answer(grammar, random.Random(seed))
        except GrammarRefused:
            continue
        if answer is not None:
            document = bytes(answer).decode()
            assert document.endswith(end)
            assert complaint(schema, document.removesuffix(end).strip()) == "", document


@settings(max_examples=examples(100), deadline=None, derandomize=not THOROUGH)
@given(values)
def test_a_constant_is_accepted_as_it_is_usually_written(value: Any) -> None:
    try:
        matcher = COMPILER.compile(schema_spec({"const": value}))
    except GrammarRefused as exc:
        assert "a number" in str(exc) or "too many digits" in str(exc) or "beyond" in str(exc)
        return
    usual = written(json.loads(write_json(value)))
    if "e" not in usual and "-0.0" not in usual:  # numbers are written without exponents
        assert lets_through(
            matcher, usual.replace(".0,", ",").replace(".0]", "]").replace(".0}", "}").removesuffix(".0")
        )


@pytest.mark.parametrize("name", FORMATS)
def test_strings_of_a_format_have_it(name: str) -> None:
    schema = write_json({"type": "string", "format": name})
    for seed in range(40):
        answer = WALKER.draw_answer(schema_spec(schema), random.Random(seed), hurry_after=seed)
        if answer is not None:
            assert complaint(schema, bytes(answer).decode()) == ""


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        {"properties": {"a": {"type": "integer"}}},
        {"required": ["a"], "properties": {"b": {}}, "allOf": [{"properties": {"a": {"type": "integer"}}}]},
    ],
)
def test_a_name_cannot_be_spelled_by_escapes_to_go_around_its_schema(schema: dict[str, Any]) -> None:
    matcher = COMPILER.compile(schema_spec({"type": "object"} | schema))
    for name in (r"\u0061", r"\u0061b", r"\u{61}"):
        assert not lets_through(matcher, f'{{"a":1,"{name}":"x"}}')
        assert not lets_through(matcher, f'{{"{name}":"x"}}')


def test_escapes_of_control_characters_stay_where_every_name_has_its_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    assert allows(schema, r'{"a":"\u001b[0m"}')


def test_a_name_that_stands_twice_is_not_counted_twice() -> None:
    assert refusal({"type": "object", "minProperties": 2}).startswith("/minProperties: more than one property")
    schema = {"type": "object", "minProperties": 2, "required": ["k"]}
    assert allows(schema, '{"k":1,"a":2}')
    assert not allows(schema, '{"k":1,"k":2}')


def test_a_format_beside_a_pattern_is_kept_too() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2"}
    assert allows(schema, '"2024-02-29"')
    assert not allows(schema, '"2023-02-29"')
    named = {"$ref": "#/components/day", "components": {"day": {"type": "string", "format": "date"}}}
    assert not allows(named, '"2023-02-29"')


@pytest.mark.parametrize(
    ("pattern", "lets", "stops"),
    [
        ("^.$", ["a", "é"], ["\n", "\r", "\u2028"]),
        (r"^\s$", [" ", "\u00a0"], ["\x85", "\ufeff", "\x1c"]),
        (r"^\S$", ["a", "é"], ["\u00a0", "\ufeff", "\x85", "\x1c"]),
        (r"^[^\S]$", [" "], ["\ufeff", "a"]),
        (r"^\D$", ["a", "é"], ["1", "٣"]),
        (r"^\W$", ["-", " "], ["a", "_", "é"]),
        (r"^[\D]$", ["a"], ["1", "٣"]),
        (r"^[^\d]$", ["a"], ["1", "٣"]),
        ("^[a&&b]$", ["a", "&", "b"], ["c"]),
        ("^[[:a]$", ["[", ":", "a"], ["b"]),
        (r"^[+\--]$", ["+", "-"], [","]),
        (r"^\/\<\"$", ['/<"'], ["/"]),
        (r"^\cA[\b]$", ["\x01\b"], ["cA"]),
        (r"^\ud83d\ude00$", ["😀"], ["😁"]),
        ("^a{$", ["a{"], ["a"]),
        ("(?i)^ab$", ["ab", "AB"], ["a"]),
    ],
)
def test_patterns_match_what_they_match_in_every_dialect(pattern: str, lets: list[str], stops: list[str]) -> None:
    matcher = COMPILER.compile(schema_spec({"type": "string", "pattern": pattern}))
    for value in lets:
        options = {json.dumps(value, ensure_ascii=False), json.dumps(value)}
        assert any(lets_through(matcher, one) for one in options), value
    for value in stops:
        assert not lets_through(matcher, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"pattern": "(a"}}}, "/properties/a/pattern: at character 1 (⟶(a): the group is not"),
        ({"pattern": "a\\"}, "/pattern: at character 2 (a⟶\\): a backslash escapes nothing"),
        ({"pattern": r"a\b"}, r"/pattern: at character 2 (a⟶\b): word boundaries are not supported"),
        ({"pattern": r"(a)\1"}, r"/pattern: at character 4 ((a)⟶\1): back-references are not supported"),
        ({"pattern": "a(?!b)"}, "/pattern: at character 2 (a⟶(?!b)): look-ahead and look-behind are not supported"),
        ({"pattern": "a++"}, "/pattern: at character 3 (a+⟶+): there is nothing to repeat"),
        ({"pattern": "[]a]"}, "/pattern: at character 2 ([⟶]a]): dialects differ in what ']' means here"),
        ({"pattern": r"\Aa"}, r"/pattern: at character 1 (⟶\Aa): dialects differ in the name of the anchor"),
        ({"pattern": "a$b"}, "/pattern: an anchor is within the pattern"),
        ({"type": "object", "patternProperties": {"a(": {}}}, "/patternProperties/a(: at character 2 (a⟶(): "),
        (
            {"type": "object", "patternProperties": {"a": {}, "b": {}}},
            "/patternProperties: two of the patterns may match",
        ),
        ({"const": "\ud800"}, "/const: it contains half of a surrogate pair"),
        ({"type": "number", "multipleOf": Decimal("0.07")}, "/multipleOf: multiples of 0.07 are not computed exactly"),
        ({"multipleOf": 0}, "/multipleOf: multipleOf must not be 0"),
        (
            {"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]},
            "/allOf/1/multipleOf: its common multiples with other",
        ),
        ({"x-guidance": {"item_separator": ";"}}, "/x-guidance: options of the grammar library are not supported"),
        ({"prefixItems": [{}], "items": {}, "additionalItems": False}, "/additionalItems: it has no effect"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "prefixItems": [{}]},
            "/prefixItems: it is a keyword of draft 2020-12",
        ),
        ({"properties": {"a/b": {"not": {}}}}, "/properties/a~1b/not: the keyword 'not' is not supported"),
        ({"type": "array", "uniqueItems": True}, "/uniqueItems: the keyword 'uniqueItems' is not supported"),
        (
            {"items": {"type": "string", "format": "color"}},
            "/items/format: the format 'color' is not supported; supported are",
        ),
        ({"items": {"type": ["string", "text"]}}, "/items/type: the type 'text' does not exist"),
        ({"items": {"type": "string", "minLength": -1}}, "/items/minLength: it must be an integer"),
        ({"anyOf": [{}, {"$ref": "#/$defs/x"}], "$defs": {}}, "/anyOf/1/$ref: '/$defs/x' does not exist"),
        ({"items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "/items/oneOf: its alternatives may overlap"),
        (
            {"type": "object", "properties": {"a": {}}, "maxProperties": 1},
            "/maxProperties: it is supported only if 'required' lists all of 'properties'",
        ),
        ({"type": "string", "minLength": 3, "pattern": "^a$"}, "no document satisfies it: no string satisfies its"),
        (False, "no document satisfies it: "),
        ({"$ref": "#"}, "/$ref: no document can satisfy it, because it refers to itself for the same value"),
        (
            {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"allOf": [{}, {"$ref": "#/$defs/a"}]}}},
            "/$defs/a/allOf/1/$ref: no document can satisfy it",
        ),
    ],
)
def test_schema_parts_that_cannot_be_enforced_are_refused_with_path_and_advice(schema: Any, told: str) -> None:
    assert refusal(schema).startswith(told)


def test_the_schema_of_a_tool_is_refused_with_the_tools_name() -> None:
    tools = [ToolCallGrammar("now", "{}"), ToolCallGrammar("forecast", '{"properties": {"a": {"not": {}}}}')]
    form = ToolCallsGrammar(tools, "<c>", '{"name": "', '", "a":', "}", "", "", {}, False, False, True)
    with pytest.raises(GrammarRefused) as refused:
        COMPILER.compile(GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode()))
    assert str(refused.value).startswith("in the parameters of the tool 'forecast', /properties/a/not: ")


def test_schemas_in_a_grammar_are_exact_and_the_places_of_its_faults_stay() -> None:
    lark = 'start: "x" a\n\na: %json {\n  "type": "string",\n  "format": "date"\n} b\n'
    with pytest.raises(GrammarRefused, match=r"^line 6, column 3 \(} ⟶b\): no rule or terminal has the name 'b'"):
        COMPILER.compile(GrammarSpec(GrammarKind.GRAMMAR, lark))
    matcher = COMPILER.compile(GrammarSpec(GrammarKind.GRAMMAR, lark.replace("} b", "}")))
    assert lets_through(matcher, 'x"2024-02-29"') and not lets_through(matcher, 'x"2023-02-29"')
    with pytest.raises(GrammarRefused, match=r"^in the schema of line 3, /pattern: at character 1 "):
        COMPILER.compile(GrammarSpec(GrammarKind.GRAMMAR, lark.replace('"format": "date"', '"pattern": "(a"')))
    quoted = COMPILER.compile(GrammarSpec(GrammarKind.GRAMMAR, 'start: "%json {" // %json {"x-guidance": {}}\n'))
    assert lets_through(quoted, "%json {")


def test_schemas_that_refer_to_themselves_within_a_property_or_an_item_are_followed() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    assert allows(schema, '{"next":{"next":{}}}')
    assert allows({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]")
    assert allows({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "null"}}}, '{"a":null}')


def test_counts_may_be_written_with_a_point() -> None:
    assert allows('{"type": "string", "minLength": 2.0}', '"ab"')
    assert not allows('{"type": "string", "minLength": 2.0}', '"a"')


def test_a_rewritten_schema_is_a_schema_again() -> None:
    assert exact_schema_of('{"type": "array", "uniqueItems": false}').schema == {"type": "array"}
    assert exact_schema_of("true").schema == {}

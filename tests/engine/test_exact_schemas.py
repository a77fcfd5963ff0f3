"""An accepted schema is kept exactly: what its grammar lets through is valid under it. The rest is refused by place."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tests.grammar_walks import GrammarWalker
from tests.schema_oracle import complaint, read_decimal, write_json

from moiety_engine.scripted.text_model import END_ID, scripted_text_model
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_schemas import exact_schema_of
from moiety_engine.structured_outputs.grammar_tokenizer import GrammarTokenizer
from moiety_wire.grammars import GrammarKind, GrammarSpec, ToolCallGrammar, ToolCallsGrammar

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


# ── schemas at random ──

NAMES = ("a", "b", "é", "x y", 'q"', "a/b", "", "longer")
WORDS = (
    *("", "a", "ab", "é", "😀", 'say "hi"', "back\\slash", "\n\t", "\u2028", "\x7f", "𝒳y", "0", "null"),
    *("<tool_call>", "a/b", "AB-123"),
)
PATTERNS = (
    *("^[A-Z]{2,4}-[0-9]{3}$", "a", "^a", "b$", r"^\d+$", r"^\w{1,3}$", "^.{2}$", r"\s", r"^\S+$", "^(foo|bar)$"),
    *("^foo|bar$", "^[^a]*$", r"\u00e9", '["\\\\]', r"^\W$", r"^\D{2}$", "^a/b$", r"^[\s\S]{1,2}$", "^$", "(?:ab)+"),
    *(r"^a\.b$", r"^[\d\-]{2}$", r"^\p{L}+$", "(?i)^a$", r"^\t$", r"^[\w.]+@", r"^\x41$", "a\\\\$", r"^[\^$]$"),
    *("^[a&&b]$", "^[[:ab]$", "^{a}$", r"^[^\W\d]$"),
)
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "duration", "uri")
MULTIPLES = tuple(map(Decimal, ("0.1", "0.01", "0.5", "0.25", "0.07", "1.5", "2.5", "0.001", "100.0", "0.3", "3.3")))

small = st.integers(-20, 20)
integers = st.one_of(small, st.integers(-(10**6), 10**6), st.sampled_from([2**31, 2**53 - 1, 1 - 2**53, 10**15]))
numbers = st.one_of(
    integers,
    st.decimals(-1000, 1000, places=2),
    st.decimals(-5, 5, places=4),
    st.sampled_from([Decimal(one) for one in ("0.1", "1e-7", "-0.5", "1e10", "0.001", "123456.789", "-0.0")]),
)
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.sampled_from(WORDS)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)),
    max_leaves=4,
)


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def joined(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda found: {key: one for part in found for key, one in part.items()})


number_schemas = joined(
    st.sampled_from([{"type": "number"}, {"type": "integer"}, {"type": ["number", "string"]}, {}]),
    some(
        minimum=numbers,
        maximum=numbers,
        exclusiveMinimum=numbers,
        exclusiveMaximum=numbers,
        multipleOf=st.one_of(st.integers(1, 30), st.sampled_from(MULTIPLES)),
    ),
)
string_schemas = joined(
    st.just({"type": "string"}),
    some(
        minLength=st.integers(0, 4),
        maxLength=st.integers(2, 40),
        pattern=st.sampled_from(PATTERNS),
        format=st.sampled_from(FORMATS),
    ),
)
fixed_schemas = st.one_of(
    values.map(lambda value: {"const": value}),
    st.lists(values, min_size=1, max_size=4).map(lambda found: {"enum": found}),
    joined(
        st.lists(numbers, min_size=1, max_size=4).map(lambda found: {"enum": found}),
        some(minimum=small, multipleOf=st.integers(1, 5), type=st.just("integer")),
    ),
    joined(
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(lambda found: {"enum": found}),
        some(minLength=st.integers(0, 3), pattern=st.sampled_from(PATTERNS), type=st.just("string")),
    ),
)
leaf_schemas = st.one_of(
    number_schemas,
    string_schemas,
    fixed_schemas,
    st.sampled_from([{}, True, False, {"type": "null"}, {"type": ["integer", "null"]}, {"type": "object"}]),
    st.sampled_from([{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/tree"}]),
)


def inner_schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = joined(
        st.sampled_from([{"type": "object"}, {"type": "object"}, {}]),
        some(
            properties=st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
            required=st.lists(st.sampled_from(NAMES), max_size=3, unique=True),
            additionalProperties=st.one_of(st.just(False), inner),
            patternProperties=st.dictionaries(st.sampled_from(PATTERNS[:12]), inner, max_size=2),
            minProperties=st.integers(0, 3),
            maxProperties=st.integers(0, 4),
        ),
    )
    arrays = joined(
        st.sampled_from([{"type": "array"}, {"type": "array"}, {}]),
        some(
            items=inner,
            prefixItems=st.lists(inner, min_size=1, max_size=3),
            minItems=st.integers(0, 3),
            maxItems=st.integers(0, 4),
        ),
    )
    parts = st.lists(inner, min_size=1, max_size=3)
    combined = st.one_of(*(st.fixed_dictionaries({key: parts}) for key in ("anyOf", "oneOf", "allOf")))
    return st.one_of(objects, arrays, combined, joined(combined, objects), joined(combined, number_schemas))


def with_definitions(found: tuple[Any, Any, Any]) -> str:
    root, leaf, tree = found
    named = {"$defs": {"leaf": leaf, "tree": tree}}
    return write_json((root if isinstance(root, dict) else {"allOf": [root]}) | named)


tree_schemas = st.recursive(leaf_schemas, inner_schemas, max_leaves=8)
schemas = st.one_of(
    st.one_of(number_schemas, string_schemas, fixed_schemas).map(write_json),
    st.tuples(tree_schemas, leaf_schemas, tree_schemas).map(with_definitions),
)


# ── documents near what a schema says ──

STRINGS = (
    *("".join(one) for size in range(3) for one in itertools.product("abé\n1_\u2028 ", repeat=size)),
    *WORDS,
    *("foo", "bar", "foox", "xbar", "ABCDE-123", "\t", "\x01", "\u00a0", "\ufeff", "\x85", "\r", "\x1c", "٣", "a.b"),
    *("axb", "-1", "1-", "^", "$", "a\\", "\u212a", "&", ":", "[", "{a}", "2024-02-30", "2024-02-29", "2023-02-29"),
    *("0000-01-01", "12:00:60Z", "12:00:00", "2024-01-01T00:00:00Z", "::1", "1:2:3:4:5:6:7::", "::ffff:1.2.3.4"),
    *("1.2.3.4", "1.2.3.256", "01.2.3.4", "P1Y", "PT1S", "P1W", "P1WT1S", "P", "P1Y1D", "a@b", "a@b.c", "a..b@c"),
    *("a" * 63, "a" * 64 + ".b", "a-.b", "-a", "a_b", "xn--a", "ab--cd.com", "a.", "http://a", "a:", "http://a b"),
    *("http://[::1]", "//a", "urn:x", "http://a:99999999/", "http://%zz", "00000000-0000-0000-0000-000000000000"),
)
NUMERALS = (
    *("0", "-0", "0.0", "-0.0", "1", "-1", "0.1", "0.10", "1.0", "1e0", "1e1", "10", "100", "1e-1", "0.3", "0.30"),
    *("0.07", "0.14", "0.49", "1.5", "3.0", "7", "21", str(2**53 - 1), str(2**53), str(-(2**53) - 1), "1e400"),
    *("1.000000000000000000001", "0.000000000000000001", "1e-7", "0.0000001", "2.50"),
)


class Written(str):
    """A number as it is to stand in a document."""


def numerals_near(schema: str) -> list[str]:
    """The numbers in a schema, and those around them."""
    found = set(NUMERALS)
    for match in re.finditer(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", schema):
        one = Decimal(match[0])
        tenth, little = Decimal("0.1"), Decimal("1e-9")
        near = (one, one + 1, one - 1, one + tenth, one - tenth, one * 2, one * 3, -one, one + little, one - little)
        found |= {format(number, "f") for number in near} | {f"{one:e}"}
    return sorted(found)


def written(value: Any) -> str:
    if isinstance(value, Written):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{written(name)}:{written(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from places(one, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], draw: random.Random, numerals: list[str]) -> Any:
    """The value with another one at a place."""
    if path and isinstance(value, dict):
        return {key: replaced(one, path[1:], draw, numerals) if key == path[0] else one for key, one in value.items()}
    if path:
        return [replaced(one, path[1:], draw, numerals) if at == path[0] else one for at, one in enumerate(value)]
    number, string = Written(draw.choice(numerals)), draw.choice(STRINGS)
    if draw.random() < 0.2:
        return draw.choice([None, True, {}, [], number, string])
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if draw.random() < 0.8}
        return kept | ({draw.choice(NAMES): draw.choice([number, string])} if draw.random() < 0.5 else {})
    if isinstance(value, list):
        return value[:-1] if draw.random() < 0.5 else [*value, draw.choice([number, string])]
    return string if isinstance(value, str) else number


def documents_near(schema: str, drawn: list[str], draw: random.Random) -> list[str]:
    numerals = numerals_near(schema)
    bases = [json.loads(one, parse_float=read_decimal) for one in drawn] or [{}]
    found = [*numerals, *(written(one) for one in draw.sample(STRINGS, 30))]
    for _ in range(40):
        base = draw.choice(bases)
        found.append(written(replaced(base, draw.choice(list(places(base))), draw, numerals)))
    return found


@settings(max_examples=250, deadline=None, derandomize=not THOROUGH)
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


@settings(max_examples=60, deadline=None, derandomize=not THOROUGH)
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


@settings(max_examples=100, deadline=None, derandomize=not THOROUGH)
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


# ── what random schemas seldom meet ──


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

"""Strings of JSON with large limits of their length: exactly the allowed ones are let through."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tests.grammar_walks import GrammarWalker
from tests.schema_oracle import complaint
from tests.tool_call_grammars import GrammarText, format_named, with_added_tokens

from moiety_engine.scripted.text_model import END_ID, scripted_text_model
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_schemas import exact_schema_of
from moiety_engine.structured_outputs.grammar_tokenizer import GrammarTokenizer
from moiety_engine.structured_outputs.long_string_schemas import rules_of_schema
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_wire.grammars import GrammarKind, GrammarSpec

TEXT = scripted_text_model()  # whose tokens are bytes
GRAMMAR_TOKENIZER: Any = GrammarTokenizer(TEXT.tokenizer_json, TEXT.eos_token_ids)
TOKENIZER = LLTokenizer(GRAMMAR_TOKENIZER, eos_token=list(TEXT.eos_token_ids))
COMPILER = GrammarCompiler(TEXT.tokenizer_json, TEXT.eos_token_ids)
WALKER = GrammarWalker(COMPILER, GRAMMAR_TOKENIZER.tokens, TEXT.eos_token_ids)
BOUNDS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 1000, 4097, 100_000)
CHARACTERS = (
    "a",
    " ",
    "é",
    "ࠀ",
    "中",
    "\ue000",
    "😀",
    "\U0010ffff",
    '"',
    "\\",
    "/",
    "\n",
    "\t",
    "\x00",
    "\x1f",
    "\x7f",
)
LONG = {"type": "string", "maxLength": 5000}  # makes the strings of a schema be counted in chunks


def of_length(num_chars: int, seed: int) -> str:
    draw = random.Random(seed)
    pieces = CHARACTERS if seed else CHARACTERS[:2]
    return "".join(draw.choices(pieces, k=num_chars))


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def written(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False).replace("\x7f", "\\u007f")


def compiled(schema: Any) -> LLMatcher:
    return COMPILER.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def is_let_through(matcher: LLMatcher, document: str) -> bool:
    tokens = [*document.encode(), END_ID]
    found = matcher.validate_tokens(tokens) == len(tokens)
    assert not matcher.is_error(), matcher.get_error()
    return found


def is_written_as_rules(schema: Any) -> bool:
    return rules_of_schema(exact_schema_of(json.dumps(schema)).schema) is not None


@pytest.mark.parametrize("most", BOUNDS)
def test_a_string_of_the_largest_length_is_allowed_and_a_longer_one_is_not(most: int) -> None:
    other = closed({"a": {"type": "string", "maxLength": most}, "b": LONG}, required=["a"])
    assert is_written_as_rules(other)
    matcher = compiled(other)
    for seed in range(4):
        assert is_let_through(matcher, written({"a": of_length(most, seed)}))
        assert not is_let_through(matcher, written({"a": of_length(most + 1, seed)}))
        assert is_let_through(matcher, written({"a": of_length(most // 2, seed), "b": "é" * 5000}))


@pytest.mark.parametrize("least", BOUNDS)
def test_a_string_of_the_smallest_length_is_allowed_and_a_shorter_one_is_not(least: int) -> None:
    for most in {least, least + 1, least + 63, least + 64, least + 3000, None}:
        limits = {"type": "string", "minLength": least, **({} if most is None else {"maxLength": most})}
        matcher = compiled(closed({"a": limits, "b": LONG}, required=["a"]))
        assert is_let_through(matcher, written({"a": of_length(least, 1)}))
        if least:
            assert not is_let_through(matcher, written({"a": of_length(least - 1, 1)}))
        beyond = is_let_through(matcher, written({"a": of_length((least if most is None else most) + 1, 1)}))
        assert beyond is (most is None)


@pytest.mark.parametrize("least", [0, 1, 63, 64, 100, 128, 130])
def test_each_length_is_let_through_as_the_limits_say(least: int) -> None:
    for most in {least, least + 5, *(one for one in (127, 128, 192, 200) if one >= least)}:
        item = {"type": "string", "minLength": least, "maxLength": most}
        matcher = compiled({"type": "array", "prefixItems": [item], "items": LONG, "maxItems": 2})
        for length in range(210):
            assert is_let_through(matcher, written(["é" * length])) is (least <= length <= most)


def test_many_different_limits_do_not_reach_the_limit_of_the_lexer() -> None:
    limits = {f"f{i}": 5000 + 37 * i for i in range(20)}
    properties = {name: {"type": "string", "maxLength": most} for name, most in limits.items()}
    matcher = compiled(closed(properties, required=list(limits)))
    values = {name: of_length(most, most) for name, most in limits.items()}
    assert is_let_through(matcher, written(values))
    assert not is_let_through(matcher, written({**values, "f19": values["f19"] + "a"}))


def test_each_token_of_a_long_string_is_in_its_mask() -> None:
    matcher = compiled(closed({"a": {"type": "string", "maxLength": 4097}}, required=["a"])).deep_copy()
    for token_id in written({"a": of_length(4097, 1)}).encode():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert mask >> token_id & 1
        assert matcher.consume_token(token_id)
    assert matcher.is_accepting()


PLACES: tuple[tuple[Any, Any], ...] = (  # a schema around the string, and a document around "…"
    ({"type": "array", "items": "…"}, ["a", "…"]),
    ({"type": "array", "items": "…", "minItems": 2, "maxItems": 2}, ["", "…"]),
    ({"type": "array", "prefixItems": [{"type": "integer"}, "…"], "items": False}, [3, "…"]),
    (closed({"a": closed({"b": "…"}, required=["b"])}), {"a": {"b": "…"}}),
    ({"type": "object", "properties": {"a": "…"}}, {"a": "…", "b": [1, {"c": 2.5}]}),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": "…"}, {"a": 3, "b": "…"}),
    ({"type": "object", "additionalProperties": "…"}, {"a": "x", "b": "…"}),
    ({"anyOf": [{"type": "null"}, "…", {"enum": ["a", "b"]}]}, "…"),
    ({"anyOf": [closed({"k": {"const": "a"}, "v": "…"}, required=["k"]), {"type": "number"}]}, {"k": "a", "v": "…"}),
    (
        {
            "oneOf": [
                closed({"k": {"const": "a"}, "v": "…"}, required=["k", "v"]),
                closed({"k": {"const": "b"}, "v": {"type": "string"}}, required=["k", "v"]),
            ]
        },
        {"k": "a", "v": "…"},
    ),
    ({"$ref": "#/$defs/a", "$defs": {"a": "…"}}, "…"),
    (
        {
            "$ref": "#/$defs/node",
            "$defs": {"node": closed({"text": "…", "next": {"$ref": "#/$defs/node"}}, required=["text"])},
        },
        {"text": "", "next": {"text": "a", "next": {"text": "…"}}},
    ),
    ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": closed({"b": "…"})}, "title": "t"}, {"b": "…"}),
    (closed({"a/b\n": "…", 'say "hi"': {"type": "boolean"}}), {"a/b\n": "…", 'say "hi"': True}),
)


def put(place: Any, value: Any) -> Any:
    """Return the schema or the document with the value for "…"."""
    if place == "…":
        return value
    if isinstance(place, dict):
        return {key: put(one, value) for key, one in place.items()}
    return [put(one, value) for one in place] if isinstance(place, list) else place


@pytest.mark.parametrize(("schema", "document"), PLACES)
def test_strings_within_objects_lists_and_alternatives_are_counted(schema: Any, document: Any) -> None:
    whole = put(schema, {"type": "string", "maxLength": 3001})
    assert is_written_as_rules(whole)
    matcher = compiled(whole)
    for seed in range(3):
        text = "".join(one if one >= " " and one != "\x7f" else "\n" for one in of_length(3002, seed))  # no \\u escapes
        assert is_let_through(matcher, written(put(document, text[:3001])))
        assert not is_let_through(matcher, written(put(document, text)))


@pytest.mark.parametrize(("schema", "document"), PLACES)
def test_all_answers_of_written_schemas_are_valid(schema: Any, document: Any) -> None:
    whole = put(schema, {"type": "string", "maxLength": 3001})
    draw = random.Random(3)
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(whole))
    for _ in range(10):
        answer = WALKER.draw_answer(spec, draw, hurry_after=20)
        if answer is not None:
            assert complaint(json.dumps(whole), bytes(answer).decode()) == ""


def test_each_part_of_a_large_schema_has_only_the_definitions_that_it_refers_to() -> None:
    definitions = {
        f"kind/{i}": closed({"a": {"enum": [f"{i} {'x' * 180}"]}, "next": {"$ref": f"#/$defs/kind~1{i + 1}"}})
        for i in range(90)
    }
    definitions["kind/90"] = {"type": "integer"}
    definitions["kind/45"] = {"type": "boolean"}  # ends the way from the first ones
    members = {f"m{i}": {"$ref": f"#/$defs/kind~1{i}"} for i in range(90)}
    schema = closed({**members, "text": {"type": "string", "maxLength": 20_000}}, required=["text"])
    schema["$defs"] = definitions
    assert len(json.dumps(schema)) > 18_000
    assert is_written_as_rules(schema)
    matcher, text = compiled(schema), of_length(20_001, 1)
    assert is_let_through(matcher, written({"m44": {"next": True}, "m89": {"next": 3}, "text": text[:-1]}))
    assert not is_let_through(matcher, written({"m44": {"next": 3}, "text": ""}))
    assert not is_let_through(matcher, written({"text": text}))


@pytest.mark.parametrize(
    "schema",
    [
        closed({"a": {**LONG, "pattern": "^a"}}),
        closed({"a": LONG}, minProperties=1, required=["a"]),
        {"type": "object", "patternProperties": {"^a": LONG}},
        {"anyOf": [LONG, {"type": "string", "pattern": "^a+$"}]},
        {"anyOf": [closed({"a": LONG}), closed({"a": {"type": "string"}, "b": {"type": "null"}})]},
        {"maxLength": 5000},
        {"type": "string", "maxLength": 1024},
        {"type": "string", "maxLength": "5000"},
    ],
)
def test_other_schemas_stay_as_they_are(schema: Any) -> None:
    assert rules_of_schema(schema) is None


def test_a_refused_schema_is_refused_with_its_place() -> None:
    schema = closed({"a": LONG, "b": {"type": "string", "format": "none"}})
    with pytest.raises(GrammarRefused, match="/properties/b/format: the format 'none' is not supported"):
        compiled(schema)


DOCUMENTS = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "a", "é" * 64, "b" * 65, "c" * 129, 'x"\\'])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b", "c", 'q"']), inner, max_size=3)
    ),
    max_leaves=5,
)
PARTS = st.recursive(
    st.sampled_from(
        [
            LONG,
            {"type": "integer"},
            {"enum": ["a", 3]},
            {"type": "string", "maxLength": 128},
            {"type": "string", "maxLength": 64},
            {},
            {"type": "null"},
            True,
        ]
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from(["a", "b", 'q"']), inner)},
            optional={"additionalProperties": st.one_of(st.booleans(), inner), "required": st.just(["a"])},
        ),
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={
                "items": inner,
                "prefixItems": st.lists(inner, max_size=2),
                "minItems": st.integers(0, 2),
                "maxItems": st.integers(0, 3),
            },
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
    ),
    max_leaves=6,
)


WHITESPACE = ("", "", "", " ", "  ", "\n  ", "\t", "\r\n", "\x0b", "\u00a0")


@given(PARTS, DOCUMENTS, st.randoms(use_true_random=False))
def test_a_schema_within_a_grammar_has_the_same_white_space_beside_a_long_string(
    part: Any, document: Any, draw: random.Random
) -> None:
    def with_limit(limit: int) -> LLMatcher | None:
        long = {"type": "string", "maxLength": limit}
        schema = {"type": "object", "properties": {"long": long, "part": part}, "required": ["part"]}
        grammar = f'start: "<" document ">"\ndocument: %json {json.dumps(schema)}'
        try:
            return COMPILER.compile(GrammarSpec(GrammarKind.GRAMMAR, grammar))
        except GrammarRefused:
            return None  # no document satisfies it

    without, beside = with_limit(0), with_limit(5000)
    if without is None or beside is None:
        assert without is beside
        return
    text = json.dumps({"long": "", "part": document}, ensure_ascii=False)
    spaced = "".join(
        f"{draw.choice(WHITESPACE)}{one}{draw.choice(WHITESPACE)}" if one in "{}[],:" else one for one in text
    )
    for one in (text, text.replace(" ", ""), spaced):
        assert is_let_through(beside, f"<{one}>") is is_let_through(without, f"<{one}>"), one


@pytest.mark.parametrize("space", ["", " ", "\n\t ", "\x0b"])
def test_documents_of_a_grammar_may_have_white_space_around_a_long_string(space: str) -> None:
    schema = closed({"a": LONG, "b": {"type": "array", "items": LONG}}, required=["a"])
    matcher = COMPILER.compile(GrammarSpec(GrammarKind.GRAMMAR, f"start: %json {json.dumps(schema)}"))
    for length in (5000, 5001):
        document = json.dumps({"a": "x" * length, "b": ["", "y"]}, separators=(f"{space},{space}", f"{space}:{space}"))
        is_allowed = length == 5000 and space != "\x0b"
        assert is_let_through(matcher, document.replace("{", "{" + space).replace("]", space + "]")) is is_allowed


@pytest.mark.parametrize("indent", [None, 1])
def test_long_strings_are_counted_wherever_a_grammar_has_their_schema(indent: int | None) -> None:
    one, two = (json.dumps(closed({"a": LONG}, **more), indent=indent) for more in ({}, {"required": ["a"]}))
    text = f'start: "%json {{" (%json {one} | "<" inner ">") END // %json {{}}\ninner: %json\n  {two}\nEND: "." | /%/\n'
    matcher, long = COMPILER.compile(GrammarSpec(GrammarKind.GRAMMAR, text)), of_length(5001, 1)
    for opener, closer in (("", ""), ("<", ">")):
        assert is_let_through(matcher, "%json {" + opener + written({"a": long[1:]}) + closer + ".")
        assert not is_let_through(matcher, "%json {" + opener + written({"a": long}) + closer + ".")
    assert is_let_through(matcher, "%json {{}%") and not is_let_through(matcher, "%json {<{}>%")


@given(PARTS, DOCUMENTS, st.randoms(use_true_random=False))
def test_the_rules_let_through_what_the_schema_does(part: Any, document: Any, draw: random.Random) -> None:
    schema = {"type": "object", "properties": {"long": LONG, "part": part}, "required": ["part"]}
    exact = exact_schema_of(json.dumps(schema))
    options = exact.options(whitespace_pattern=r"\x20")
    rules = rules_of_schema(json.loads(exact.encode(**options)))
    if rules is None:
        return
    by_rules = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(rules), log_level=0)
    by_schema = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(exact.encode(), overrides=options), log_level=0)
    if by_rules.is_error() or by_schema.is_error():
        return
    text = json.dumps({"part": document}, ensure_ascii=False)
    spaced = "".join(one + " " * draw.choice([0, 0, 0, 0, 1, 2]) if one in "{}[],:" else one for one in text)
    for one in (text, text.replace(" ", ""), spaced):
        assert is_let_through(by_rules, one) is is_let_through(by_schema, one), one


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama", "deepseek_v3"])
def test_long_arguments_of_strict_calls_are_counted(name: str) -> None:
    text, way = GrammarText(with_added_tokens(special=True)), format_named(name)
    schema = closed({"a": {"type": "string", "minLength": 2, "maxLength": 4097}}, required=["a"])
    grammar = text.grammar(name, ToolOffer((Tool("f", "", schema, strict=True),)))
    matcher = text.compiler.compile(grammar)

    def is_allowed(value: str) -> bool:
        arguments = written({"a": value})
        tokens = text.spell(f"{way.to_name}f{way.to_arguments}{arguments}{way.to_end}{way.closer}", way)
        return matcher.validate_tokens([*tokens, END_ID]) == len(tokens) + 1

    assert is_allowed(of_length(4097, 1)) and is_allowed("ab")
    assert not is_allowed(of_length(4098, 1)) and not is_allowed("a")

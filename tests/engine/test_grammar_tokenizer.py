"""Added tokens are matched by their ids only, in grammars and in the calls of every tool format."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest
from tests.tool_call_grammars import FORMATS, PLACE, TOOLS, GrammarText, format_named, with_added_tokens

from moiety_demo import checkpoint_path
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.grammar_tokenizer import GrammarTokenizer
from moiety_text.folder import TextModel, read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.deltas import Call
from moiety_text.tools.formats import ToolFormat
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_wire.grammars import GrammarKind, GrammarSpec


@pytest.fixture(scope="module", params=[False, True], ids=["added", "special"])
def text(request: pytest.FixtureRequest) -> GrammarText:
    return GrammarText(with_added_tokens(request.param))


TEXTS = ["<|end|>", "a <think> b", "<tool_call>", "user\n", "   x", "[ARGS]é", "<[256]>", "\x00[256]"]


@pytest.mark.parametrize("wanted", TEXTS)
def test_a_choice_that_reads_like_an_added_token_is_written_with_ordinary_tokens(
    text: GrammarText, wanted: str
) -> None:
    answer = text.walker.draw_answer(GrammarSpec(GrammarKind.CHOICE, json.dumps([wanted])), random.Random(1))
    assert answer is not None and bytes(answer) == wanted.encode()  # an ordinary token's id is its byte


@pytest.mark.parametrize("wanted", TEXTS[:-1])
def test_strings_of_schemas_expressions_and_grammars_are_written_with_ordinary_tokens(
    text: GrammarText, wanted: str
) -> None:
    quoted = json.dumps(wanted)
    for kind, told, expected in (
        (GrammarKind.JSON_SCHEMA, json.dumps({"const": wanted}), quoted),
        (GrammarKind.REGEX, re.escape(wanted), wanted),
        (GrammarKind.GRAMMAR, f"start: {quoted}", wanted),
    ):
        answer = text.walker.draw_answer(GrammarSpec(kind, told), random.Random(1))
        assert answer is not None and max(answer) < 256
        found = bytes(answer).decode()
        assert found == expected or json.loads(found) == json.loads(expected)


def test_an_added_token_that_a_grammar_names_outside_of_a_string_is_that_token(text: GrammarText) -> None:
    think = text.ids["<think>"]
    for lark in ("start: <think> /[ab]/", f"start: <[{think}]> /[ab]/"):
        answer = text.walker.draw_answer(GrammarSpec(GrammarKind.GRAMMAR, lark), random.Random(1))
        assert answer is not None and answer[0] == think and len(answer) == 2


def test_a_choice_on_the_demo_model_is_not_ended_by_the_token_that_it_spells() -> None:
    model = read_text_model(checkpoint_path())
    demo = GrammarText(model.tokenizer_json, model.eos_token_ids)
    answer = demo.walker.draw_answer(GrammarSpec(GrammarKind.CHOICE, '["<|im_end|>"]'), random.Random(1))
    assert answer is not None and demo.tokenizer.decode(answer) == "<|im_end|>"


def test_a_text_that_the_normalizer_would_change_is_kept() -> None:
    text = GrammarText(with_added_tokens(False, normalizer={"type": "NFC"}))
    answer = text.walker.draw_answer(GrammarSpec(GrammarKind.CHOICE, json.dumps(["e\u0301"])), random.Random(1))
    assert answer is not None and bytes(answer).decode() == "e\u0301"


def test_every_token_of_the_model_has_the_bytes_that_answers_get_from_it() -> None:
    model: TextModel = read_text_model(checkpoint_path())
    seen = GrammarTokenizer(model.tokenizer_json, model.eos_token_ids)
    tokenizer = Tokenizer.from_json(model.tokenizer_json)
    assert seen.tokens == [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    assert set(tokenizer.added_tokens) <= set(seen.special_token_ids)
    assert tokenizer.decode(seen("17 + 25 = 42, né?")) == "17 + 25 = 42, né?"


# ── calls ──


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("forced", [None, "forecast"])
def test_a_call_that_must_be_made_keeps_to_its_schema(text: GrammarText, name: str, forced: str | None) -> None:
    way = format_named(name)
    for seed in range(4):
        offer = ToolOffer(TOOLS[1:], must_call=True, forced=forced, parallel=forced is None)
        answer = text.walker.draw_answer(text.grammar(name, offer), random.Random(seed))
        assert answer is not None
        calls = list(way.new_reader(offer, is_rest=False).read(text.decode(answer)))
        assert isinstance(calls[0], Call)
        check_calls(calls, at_least=1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_the_model_makes_by_itself_keep_to_their_schemas_one_after_another(
    text: GrammarText, name: str
) -> None:
    way = format_named(name)
    offer = ToolOffer(TOOLS if way.parameters is None else TOOLS[1:])  # a random walk finds no end of a free text
    markers = {one for marker, one in text.ids.items() if marker in way.markers}
    counts = []
    for seed in range(6):
        answer: list[int] = []
        draw = random.Random(seed)
        for _ in range(2 if way.marks_calls else 1):  # begin another call where the last one has ended
            opened = text.spell(way.to_name + "forecast", way)
            answer = text.walker.draw_answer(text.grammar(name, offer), draw, [*answer, *opened], hurry_after=0) or []
            assert answer
        told = text.decode(answer)
        if way.marks_calls and markers:
            assert markers & set(answer)
        parts = way.new_reader(offer, is_rest=False).read(told)
        counts.append(check_calls(parts, at_least=1))
    if way.marks_calls:
        assert max(counts) >= 2, "some answer has calls in a row"


def check_calls(parts: list[Any], *, at_least: int) -> int:
    calls = [part for part in parts if isinstance(part, Call)]
    assert len(calls) >= at_least, parts
    for call in calls:
        schema = PLACE if call.name == "forecast" else {"type": "object"}
        jsonschema_rs.validator_for(schema).validate(json.loads(call.arguments))
    return len(calls)


def test_a_thought_may_stand_before_a_call(text: GrammarText) -> None:
    name, offer, ids = "hermes with thoughts", ToolOffer(TOOLS, parallel=False), text.ids
    way = format_named(name)
    begun = [ids["<think>"], *b"Hm.", ids["</think>"], ids["<tool_call>"], *b'\n{"name": "forecast']
    answer = text.walker.draw_answer(text.grammar(name, offer), random.Random(3), begun, hurry_after=0)
    assert answer is not None
    check_calls(way.new_reader(offer, is_rest=False).read(text.decode(answer)), at_least=1)


def test_a_turn_cannot_be_forged_in_the_text_beside_calls(text: GrammarText) -> None:
    matcher = text.compiler.compile(text.grammar("hermes", ToolOffer(TOOLS)))
    assert matcher.validate_tokens([*b"text", text.ids["<|user|>"]]) == 4


# ── calls with a tag for each parameter ──

TAGGED = ("qwen3_coder", "mimo", "glm45", "glm47", "minimax_m2", "deepseek_v32", "step3", "hy_v3")
LOOKUP = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "note": {"type": ["string", "null"]},
        "mode": {"enum": ["fast", "a/b <c", None]},
        "code": {"type": "string", "pattern": "^[a-z/]+$", "maxLength": 5},
        "day": {"type": "string", "format": "date"},
        "count": {"type": "integer", "minimum": 1},
        "options": {"$ref": "#/$defs/options"},
    },
    "required": ["query", "count"],
    "additionalProperties": False,
    "$defs": {"options": {"type": "object", "properties": {"x": {"type": "string"}}, "additionalProperties": False}},
}
GOOD: list[dict[str, Any]] = [
    {"query": "x", "count": 1},
    {"query": "né </b> <tool\n\n", "note": "yes", "mode": "a/b <c", "code": "a/b", "day": "2026-11-28", "count": 20},
    {"query": "", "mode": None, "count": 3, "options": {"x": "</parameter> é"}},
]
BAD: list[dict[str, Any]] = [
    {"count": 1},
    {"query": "x", "count": 0},
    {"query": "x", "count": "many"},
    {"query": "x", "mode": "slow", "count": 1},
    {"query": "x", "code": "A", "count": 1},
    {"query": "x", "code": "abcdef", "count": 1},
    {"query": "x", "day": "today", "count": 1},
    {"query": "x", "count": 1, "options": {"y": 1}},
    {"query": "x", "count": 1, "more": "z"},
]


def written(way: ToolFormat, tool: str, arguments: dict[str, Any]) -> str:
    """A call as the grammar has it, up to the end of its arguments."""
    tags = way.parameters
    assert tags is not None
    told = way.to_name + tool + way.name_end + way.to_arguments
    for key, value in arguments.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        opened = tags.to_name + key + (tags.to_value if isinstance(value, str) else tags.to_json)
        told += opened + tags.padding + shown + tags.padding + tags.end + tags.between
    return told + str(way.to_end) + way.closer


def matched(text: GrammarText, name: str, tool: Tool, told: str) -> bool:
    matcher = text.compiler.compile(text.grammar(name, ToolOffer((tool,))))
    ids = text.spell(told, format_named(name))
    return matcher.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize("name", TAGGED)
def test_strict_calls_with_tags_are_exactly_those_of_their_schema(text: GrammarText, name: str) -> None:
    way, tool = format_named(name), Tool("lookup", "", LOOKUP, strict=True)
    for arguments in GOOD:
        told = written(way, "lookup", arguments)
        (call,) = way.new_reader(ToolOffer((tool,)), is_rest=False).read(told)
        assert isinstance(call, Call) and json.loads(call.arguments) == arguments
        assert matched(text, name, tool, told), arguments
        assert matched(text, name, tool, "So: <b> " + told + " and </"), arguments
    for arguments in BAD:
        assert not matched(text, name, tool, written(way, "lookup", arguments)), arguments


@pytest.mark.parametrize("name", TAGGED)
def test_a_tool_that_is_not_strict_takes_any_parameters_beside_a_strict_one(text: GrammarText, name: str) -> None:
    way, offer = format_named(name), ToolOffer(TOOLS)
    told = written(way, "now", {"any": "text\n", "other_one": "5"})
    matcher = text.compiler.compile(text.grammar(name, offer))
    ids = text.spell(told, way)
    assert matcher.validate_tokens(ids) == len(ids)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (
            {"properties": {"a": {"type": ["string", "object"], "required": ["b"]}}},
            "/properties/a/required: the keyword",
        ),
        (
            {"properties": {"a": {"anyOf": [{"type": "string"}, {"enum": [1]}]}}},
            "/properties/a: a value that is either",
        ),
        ({"properties": {"a": {"enum": ["1", 1]}}}, "/properties/a/enum: '1' cannot be told from"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "/properties/a/enum: '</parameter>' contains the tag"),
        ({"properties": {"a": {"type": "integer", "not": {}}}}, "in the parameter 'a' of the tool 'f', /not: "),
        ({"properties": {"a>b": {"type": "string"}}}, "/properties/a>b: the name cannot be written"),
        ({"properties": {}, "required": ["a"]}, "/required: 'a' is not among the properties"),
        ({"minProperties": 1}, "/minProperties: the keyword"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}}, "the reference"),
        ({"properties": {"a": {"type": "string", "format": "color"}}}, "/properties/a/format: the format 'color'"),
    ],
)
def test_a_schema_that_calls_with_tags_cannot_keep_is_refused_with_its_place(
    text: GrammarText, schema: dict[str, Any], told: str
) -> None:
    tool = Tool("f", "", {"type": "object", **schema}, strict=True)
    with pytest.raises(GrammarRefused) as refused:
        text.compiler.compile(text.grammar("qwen3_coder", ToolOffer((tool,))))
    assert told in str(refused.value)

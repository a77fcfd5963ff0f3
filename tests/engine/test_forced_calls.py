"""Calls of tools that are not strict: a forced call is complete, and a single call is single, in every format."""

from __future__ import annotations

import json
import random
import re

import msgspec
import pytest
from tests.tool_call_grammars import FORMATS, GrammarText, format_named, with_added_tokens

from moiety_engine.scripted.text_model import END_ID
from moiety_engine.structured_outputs.harmony import CONTROL_TOKENS
from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.strict_tools import input_in_json, tool_grammars
from moiety_text.tools.deltas import Call
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_wire.grammars import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec, HarmonyGrammar
from moiety_wire.messages import Sampling

TOOLS = (Tool("look", "", {"type": "object"}), Tool("now", "", {"type": "object"}))
NUM_DRAWN = 6
TOO_LARGE = re.compile(r"\d[eE]\+?\d{2}")  # numbers without bounds may be too large for a double


@pytest.fixture(scope="module")
def text() -> GrammarText:
    return GrammarText(with_added_tokens(special=True))


def grammar_of(text: GrammarText, name: str, offer: ToolOffer, *, ignore_eos: bool = False) -> GrammarSpec | None:
    generation = Generation(
        "m",
        (Conversation(({"role": "user", "content": "Hi"},), tools=offer),),
        1,
        Sampling(),
        None,
        ignore_eos=ignore_eos,
    )
    return ModelText(text.card(name), 8192).answer_format(generation, 0, []).grammar


@pytest.mark.one_in(3)
@pytest.mark.parametrize("forced", [None, "now"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_is_whole_though_its_tool_is_not_strict(text: GrammarText, name: str, forced: str | None) -> None:
    offer, way, num_read = ToolOffer(TOOLS, must_call=True, forced=forced), format_named(name), 0
    grammar = grammar_of(text, name, offer)
    assert grammar is not None
    for seed in range(NUM_DRAWN):
        answer = text.walker.draw_answer(grammar, random.Random(seed), hurry_after=8)
        if answer is not None and TOO_LARGE.search(text.decode(answer)) is None:
            parts = way.new_reader(offer, is_rest=False).read(text.decode(answer))
            assert isinstance(parts[0], Call) and parts[0].name in offer.names, parts
            assert isinstance(json.loads(parts[0].arguments), dict)
            num_read += 1
    assert num_read > 0 or name == "minimax_m3", "whose elements are free, and seldom end at random"


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_parallel_calls_has_one(text: GrammarText, name: str) -> None:
    way = format_named(name)
    grammar = grammar_of(text, name, ToolOffer(TOOLS, parallel=False))
    if not way.marks_calls:
        assert grammar is None, "any text that begins like a call would be banned"
        grammar = grammar_of(text, name, ToolOffer(tuple(as_strict(tool) for tool in TOOLS), parallel=False))
    assert grammar is not None
    arguments = "" if way.parameters is not None else "{}"
    call_id = "" if way.call_id is None else f"{way.call_id.opener}abcDEF123"
    inner = f"look{way.name_end}{call_id}{way.to_arguments}{arguments}{way.to_end}"
    one = f"{way.to_name}{inner}{way.closer}"
    two = one + one if way.between is None else f"{way.to_name}{inner}{way.between}{inner}{way.closer}"
    assert is_whole(text, grammar, text.spell(one, way))
    assert not is_whole(text, grammar, text.spell(two, way))


def as_strict(tool: Tool) -> Tool:
    return Tool(tool.name, "", {"type": "object"}, strict=True)


def is_whole(text: GrammarText, grammar: GrammarSpec, ids: list[int]) -> bool:
    matcher = text.compiler.compile(grammar)
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


def test_a_free_answer_has_no_grammar_nor_one_that_goes_on_after_its_end(text: GrammarText) -> None:
    assert grammar_of(text, "hermes", ToolOffer(TOOLS)) is None
    for offer in (ToolOffer(TOOLS, must_call=True), ToolOffer(TOOLS, parallel=False)):
        assert grammar_of(text, "hermes", offer) is not None
        assert grammar_of(text, "hermes", offer, ignore_eos=True) is None


COUNTED = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 3, "maximum": 40}, "how": {"enum": ["wet", "dry"]}},
    "required": ["count", "how"],
    "additionalProperties": False,
}
UNSUPPORTED = {"type": "object", "properties": {"at": {"type": "string", "format": "color"}}, "required": ["at"]}
BOTH = (Tool("count", "", COUNTED), Tool("paint", "", UNSUPPORTED))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_call_follows_the_schema_of_a_tool_that_is_not_strict(text: GrammarText, name: str) -> None:
    """An unsupported schema beside it, for which any object is valid, changes nothing for it."""
    way, offer = format_named(name), ToolOffer(BOTH, must_call=True, parallel=False)
    grammar, found = grammar_of(text, name, offer), set()
    assert grammar is not None
    for seed in range(NUM_DRAWN):
        answer = text.walker.draw_answer(grammar, random.Random(seed), hurry_after=8)
        if answer is not None:
            (call, *_) = way.new_reader(offer, is_rest=False).read(text.decode(answer))
            assert isinstance(call, Call), call
            found.add(call.name)
            if call.name == "count":
                arguments = json.loads(call.arguments)
                assert set(arguments) == {"count", "how"} and 3 <= arguments["count"] <= 40, arguments
    assert "count" in found


def test_a_forced_call_in_the_harmony_format_follows_the_schema_of_a_tool_that_is_not_strict() -> None:
    text = GrammarText(with_added_tokens(special=True, contents=CONTROL_TOKENS))
    control = {token: text.ids[token] for token in CONTROL_TOKENS}
    for must_call, is_held in ((True, True), (False, False)):
        tools = tool_grammars(ToolOffer(BOTH, must_call=must_call), input_in_json)
        form = HarmonyGrammar(control, tools, None, must_call, banned_ids=[END_ID])
        grammar = GrammarSpec(GrammarKind.HARMONY, msgspec.json.encode(form).decode())
        for tool, body, is_valid in (
            ("count", '{"count": 3, "how": "wet"}', True),
            ("count", '{"count": 2, "how": "wet"}', not is_held),
            ("paint", '{"any": 1}', True),
        ):
            ids = [control["<|channel|>"], *f"commentary to=functions.{tool}".encode(), control["<|message|>"]]
            assert is_whole(text, grammar, [*ids, *body.encode(), control["<|call|>"]]) is is_valid


def test_schemas_of_tools_that_are_not_strict_never_make_a_grammar_too_long(text: GrammarText) -> None:
    long = {"type": "object", "properties": {f'"{i}': {"type": "string"} for i in range(1000)}}
    offer = ToolOffer((*(Tool(f"f{i}", "", long) for i in range(20)), BOTH[0]), must_call=True)
    grammar = grammar_of(text, "hermes with thoughts", offer)
    assert grammar is not None and len(grammar.text.encode()) < MAX_GRAMMAR_BYTES
    assert "maximum" in grammar.text, "the last one still fits"

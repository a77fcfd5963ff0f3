"""Calls of tools that are not strict: forced ones are whole, and one call alone is one, in every format."""

from __future__ import annotations

import json
import random
import re

import pytest
from tests.tool_call_grammars import FORMATS, GrammarText, format_named, with_added_tokens

from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.inference.model_texts import ModelText
from moiety_text.tools.deltas import Call
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_wire.grammars import GrammarSpec
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

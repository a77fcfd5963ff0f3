"""Answers that are calls or follow a response format, in formats of calls without a marker."""

from __future__ import annotations

import json

import pytest
from tests.tool_call_grammars import GrammarText, format_named, with_added_tokens

from moiety_platform.inference.custom_tools import CustomGrammar, custom_tool_of
from moiety_platform.inference.strict_tools import grammar_of_calls
from moiety_text.tools.deltas import Call
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_wire.grammars import GrammarKind, GrammarSpec

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRICT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = (
    Tool("f", "", {"type": "object"}),
    Tool("g", "", STRICT, strict=True),
    custom_tool_of("write", None, CustomGrammar("regex", "a+")),
)


def in_json(arguments: str, *calls: tuple[str, str]) -> list[str]:
    return [f'{{"name": "{name}", "{arguments}": {given}}}' for name, given in calls]


GOOD = (("f", '{"a": [1]}'), ("write", '{"input": "aa"}'), ("g", '{"x": 1}'))
WRONG = (("g", "{}"), ("write", '{"input": "b"}'), ("h", "{}"))
CALLS = {
    "llama": [*in_json("parameters", *GOOD), "; ".join(in_json("parameters", *GOOD))],
    "json_list": [
        *(f"[{call}]" for call in in_json("arguments", *GOOD)),
        f"[{', '.join(in_json('arguments', *GOOD))}]",
    ],
    "llama4_pythonic": ["[f(a=[1])]", '[write(input="aa")]', "[g(x=1), f()]"],
}
BROKEN = {
    "llama": in_json("parameters", *WRONG),
    "json_list": [f"[{call}]" for call in in_json("arguments", *WRONG)],
    "llama4_pythonic": ["[g()]", '[write(input="b")]', "[h()]"],
}


@pytest.fixture(scope="module")
def text() -> GrammarText:
    return GrammarText(with_added_tokens(special=True))


def is_followed(text: GrammarText, grammar: GrammarSpec, told: str) -> bool:
    matcher, ids = text.compiler.compile(grammar), list(told.encode())
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (
            GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
            ['{"name": "g", "age": 5}', '{"name":"Ada","age":-1}'],
            ['{"name": "f"}', '{"age": 5}', "[1]"],
        ),
        (
            GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": PERSON})),
            ["[]", '[{"name": "f", "age": 5}, {"name": "", "age": 1}]'],
            ['[{"name": "f"}]', "{}"],
        ),
        (GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]'), ["no"], ["noo", "[yes]"]),
    ],
)
def test_an_answer_is_calls_or_follows_the_format(
    text: GrammarText, name: str, answer: GrammarSpec, good: list[str], bad: list[str]
) -> None:
    way = format_named(name)
    for parallel in (True, False):
        offer = ToolOffer(TOOLS, parallel=parallel)
        grammar = grammar_of_calls(way, offer, {}, (), answer)
        for call in CALLS[name]:
            parts = way.new_reader(ToolOffer(TOOLS), is_rest=False).read(call)
            assert parts and all(isinstance(part, Call) for part in parts)
            assert is_followed(text, grammar, call) is (parallel or len(parts) == 1), call
        for told in (*BROKEN[name], *bad):
            assert not is_followed(text, grammar, told), told
        for told in good:
            assert way.new_reader(offer, is_rest=False).read(told) == [told]
            assert is_followed(text, grammar, told), told

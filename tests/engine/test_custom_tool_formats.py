"""Grammars of custom tools' inputs in every format of tool calls, as gateways make them and readers read them."""

from __future__ import annotations

import json
import random
import re

import msgspec
import pytest
from tests.tool_call_grammars import ADDED, FORMATS, GrammarText, format_named, with_added_tokens

from moiety_engine.scripted.text_model import END_ID
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.harmony import CONTROL_TOKENS
from moiety_platform.inference.custom_tools import CustomGrammar, custom_tool_of, input_of
from moiety_platform.inference.input_grammars import input_grammar_of
from moiety_platform.inference.strict_tools import input_in_json, tool_grammars, written_input
from moiety_text.harmony.reader import HarmonyReader
from moiety_text.tools.deltas import Call
from moiety_text.tools.formats import NotedArguments, ParameterTags, ToolFormat
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_wire.grammars import GrammarKind, GrammarSpec, HarmonyGrammar

EXPRESSION = r'\*[a-c<>/"\\\n\té]{2,6}-[^x\n]?'
PATCH = """
start: begin change+ "*** End" LF?   // as in a patch
begin: "*** Begin" LF
?change: ("+" | "-" | " ") /(.*)/ LF -> line
%import common.LF
"""
GOOD = [
    '*** Begin\n+a "b" \\n\n- é\U0001f600\t\n*** End',
    "*** Begin\n </p <\n*** End\n",
    "*** Begin\n+<\n-/arg_value>\n*** End",
]
BAD = ["*** Begin\n*** End", "*** Begin\n*a\n*** End", "", "*** Begin +a\n*** End"]
NESTED = 'start: pair\npair: "(" pair* ")" | /[a-z]/'  # refers to itself
TEXT_FORMATS = tuple(name for name in FORMATS if format_named(name).parameters is not None)


@pytest.fixture(scope="module")
def text() -> GrammarText:
    return GrammarText(with_added_tokens(special=True))


@pytest.fixture(scope="module")
def unmarked() -> GrammarText:
    """A tokenizer without tokens for markers."""
    return GrammarText(with_added_tokens(special=True, contents=("<other>",)))


def written(way: ToolFormat, value: str) -> str:
    """Return a whole call of `write` with this input."""
    match way.parameters:
        case ParameterTags() as tags:
            opened = f"{tags.to_name}input{tags.to_value}{tags.padding}"
            inner = f"{opened}{value}{tags.padding}{tags.end}{tags.between}"
        case NotedArguments("members", mark):
            inner = f"input:{mark}{value}{mark}"
        case NotedArguments("elements", mark):
            inner = f"{mark}<input>{value}{mark}</input>"
        case _:
            inner = f"input={json.dumps(value, ensure_ascii=False)}"
    return f"{way.to_name}write{way.to_arguments}{inner}{way.to_end}{way.closer}"


def is_followed(text: GrammarText, name: str, offer: ToolOffer, told: str) -> bool:
    matcher = text.compiler.compile(text.grammar(name, offer))
    ids = text.spell(told, format_named(name))
    return bool(matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting())


def read(name: str, offer: ToolOffer, told: str) -> str:
    (call,) = format_named(name).new_reader(offer, is_rest=False).read(told)
    assert isinstance(call, Call), call
    return input_of(call.arguments)


@pytest.mark.parametrize("tokens", ["text", pytest.param("unmarked", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", FORMATS)
def test_random_inputs_follow_their_grammar(request: pytest.FixtureRequest, tokens: str, name: str) -> None:
    found: GrammarText = request.getfixturevalue(tokens)
    offer = ToolOffer((custom_tool_of("write", None, CustomGrammar("regex", EXPRESSION)),), True, parallel=False)
    grammar, num_read = found.grammar(name, offer), 0
    for seed in range(8):
        answer = found.walker.draw_answer(grammar, random.Random(seed))
        if answer is not None:
            opened = format_named(name).new_reader(offer, is_rest=False)
            (call,) = opened.read(found.decode(answer))
            assert isinstance(call, Call) and re.fullmatch(EXPRESSION, input_of(call.arguments)), call
            num_read += 1
    assert num_read > 4


@pytest.mark.parametrize("tokens", ["text", pytest.param("unmarked", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_an_input_is_written_as_it_is_and_held_exactly(request: pytest.FixtureRequest, tokens: str, name: str) -> None:
    found: GrammarText = request.getfixturevalue(tokens)
    other = Tool("other", "", {"type": "object", "properties": {"x": {"type": "integer"}}}, strict=True)
    offer = ToolOffer((custom_tool_of("write", None, CustomGrammar("lark", PATCH)), other))
    for value in GOOD:
        told = written(format_named(name), value)
        assert is_followed(found, name, offer, told) and read(name, offer, told) == value, value
    for value in BAD:
        assert not is_followed(found, name, offer, written(format_named(name), value)), value
    end = _end_of(format_named(name))
    if end:
        told = written(format_named(name), f"*** Begin\n+{end}\n*** End")
        assert not is_followed(found, name, offer, told), "the tag would end the input"


def _end_of(way: ToolFormat) -> str:
    if isinstance(way.parameters, ParameterTags):
        return way.parameters.end
    return way.parameters.mark if isinstance(way.parameters, NotedArguments) else ""


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_a_grammar_that_refers_to_itself_is_held_where_a_token_ends_the_input(text: GrammarText, name: str) -> None:
    way, offer = format_named(name), ToolOffer((custom_tool_of("write", None, CustomGrammar("lark", NESTED)),))
    end = _end_of(way)
    special = {token: one for token, one in text.ids.items() if token in way.markers}
    is_held = bool(written_input(offer.tools[0], way, special).grammar)
    assert is_held is (not end or end.startswith(ADDED))
    if is_held:
        assert is_followed(text, name, offer, written(way, "((a)b)"))
        assert not is_followed(text, name, offer, written(way, "((a)b"))


@pytest.mark.parametrize("definition", [PATCH, NESTED])
def test_an_input_is_held_in_the_harmony_format(definition: str) -> None:
    text = GrammarText(with_added_tokens(special=True, contents=CONTROL_TOKENS))
    control = {token: text.ids[token] for token in CONTROL_TOKENS}
    offer = ToolOffer((custom_tool_of("write", None, CustomGrammar("lark", definition)),))
    form = HarmonyGrammar(control, tool_grammars(offer, input_in_json), banned_ids=[END_ID])
    matcher = text.compiler.compile(GrammarSpec(GrammarKind.HARMONY, msgspec.json.encode(form).decode()))
    good, bad = (GOOD, BAD) if definition is PATCH else (["((a)b)"], ["((a)b", ""])
    begun = [control["<|channel|>"], *b"commentary to=functions.write", control["<|message|>"]]
    for value in (*good, *bad):
        body = json.dumps({"input": value}, ensure_ascii=False)
        ids = [*begun, *body.encode(), control["<|call|>"]]
        matcher.reset()
        is_held = matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()
        assert is_held is (value in good), value
        (call,) = HarmonyReader(frozenset(["write"])).read(text.decode(ids))
        assert isinstance(call, Call) and input_of(call.arguments) == value


def test_rules_become_terminals_unless_they_refer_to_themselves_or_have_attributes() -> None:
    assert "RULE_CHANGE:" in input_grammar_of("lark", PATCH).terminals
    for definition in (
        NESTED,
        'start[lazy]: "a"',
        'start: a\nRULE_A: "b"\na: "c"',
        'start: "a"\nstart: "b"',
        "start: " + "\n".join(f"r{n}\nr{n}: r{n + 1}" for n in range(200)),
    ):
        found = input_grammar_of("lark", definition)
        assert found.terminals == "" and found.plain == definition and found.faults.terminals
    assert input_grammar_of("lark", "start: <[5]>").plain == ""


def test_a_terminal_that_expands_beyond_any_memory_is_refused(text: GrammarText) -> None:
    rules = "\n".join(f"r{n}: r{n + 1} r{n + 1} r{n + 1} r{n + 1}" for n in range(30))
    grammar = CustomGrammar("lark", f'start: r0\n{rules}\nr30: "a"')
    offer = ToolOffer((custom_tool_of("write", None, grammar),), True)
    with pytest.raises(GrammarRefused, match="with its referenced terminals expanded"):
        text.compiler.compile(text.grammar("qwen3_coder", offer))


def test_no_control_token_begins_another_message_within_a_part_of_the_harmony_format() -> None:
    text = GrammarText(with_added_tokens(special=True, contents=CONTROL_TOKENS))
    control = {token: text.ids[token] for token in CONTROL_TOKENS}
    offer = ToolOffer((custom_tool_of("write", None, CustomGrammar("regex", "a+")), Tool("f", "", {"type": "object"})))
    answers = (None, GrammarSpec(GrammarKind.JSON_OBJECT))
    thought = [control["<|channel|>"], *b"analysis", control["<|message|>"]]
    reopened = [*thought, *b"hm", control["<|end|>"], control["<|start|>"], *b"assistant"]
    final, call = [*b"final", control["<|message|>"]], [*b"commentary to=functions.", *b"f"]
    for answer in answers:
        form = HarmonyGrammar(control, tool_grammars(offer, input_in_json), answer, banned_ids=[END_ID])
        spec = GrammarSpec(GrammarKind.HARMONY, msgspec.json.encode(form).decode())
        for begun, expected in (
            ([], {"<|channel|>"}),
            (thought, {"<|end|>"}),
            ([*thought, *b"hm<|channel|>final"], {"<|end|>"}),
            ([*thought, *b"hm", control["<|end|>"]], {"<|start|>"}),
            (reopened, {"<|channel|>"}),
            ([*reopened, control["<|channel|>"], *final], set()),
            ([control["<|channel|>"], *final, *(b'{"a": "' if answer else b"Hi")], set()),
            ([control["<|channel|>"], *call], {"<|constrain|>", "<|message|>"}),
            ([control["<|channel|>"], *call, control["<|message|>"], *b'{"a": "<'], set()),
            ([control["<|channel|>"], *call, control["<|message|>"], *b"{}"], {"<|call|>"}),
        ):
            matcher = text.compiler.compile(spec)
            assert matcher.consume_tokens(begun), text.decode(begun)
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            ends = {END_ID} if matcher.is_accepting() else set()  # this tokenizer ends answers with `<|end|>`
            allowed = {token for token, one in control.items() if mask >> one & 1 and one not in ends}
            assert allowed == expected, text.decode(begun)

"""Readers of tool calls split the text of an answer into content and calls, independently of its chunks."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_text.tools.deltas import Call, CallBegun, CallEnded, Content, Delta, assemble
from moiety_text.tools.families.hermes import HermesReader
from moiety_text.tools.families.llama import LlamaReader
from moiety_text.tools.families.mistral import MistralReader
from moiety_text.tools.json_scanner import JsonScanner, Malformed
from moiety_text.tools.reader import CallReader

NAMES = ("add", "find-it", "f")
ADD = '{"a": 1, "b": [-1.5e3, null, true, "x\\n\\u00e9 } ]</tool_call>"], "c": {"": {}}}'
Parts = list[str | Call]

ANSWERS: list[tuple[type[CallReader], str, Parts]] = [
    # Hermes and Qwen
    (HermesReader, "just <b>text</b>\n", ["just <b>text</b>\n"]),
    (HermesReader, f'<tool_call>\n{{"name": "add", "arguments": {ADD}}}\n</tool_call>', [Call("add", ADD)]),
    (
        HermesReader,
        'Yes.\n\n<tool_call>{"arguments": {"q": {}}, "name": "f"}</tool_call>\n',
        ["Yes.", Call("f", '{"q": {}}')],
    ),
    (
        HermesReader,
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>!',
        [Call("f", "{}"), Call("add", "{}"), "!"],
    ),
    (HermesReader, '<tool_call>{"name": "f"}</tool_call>', [Call("f", "{}")]),
    (HermesReader, '<tool_call>{"name": "f", "arguments": {"a": 1}}', [Call("f", '{"a": 1}')]),  # the end came first
    (HermesReader, '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', [Call("f", '{"a": "1\\n2"}')]),
    # Llama
    (LlamaReader, '{"name": "add", "parameters": {"a": 1}}', [Call("add", '{"a": 1}')]),
    (
        LlamaReader,
        '\n{"type": "function", "name": "f", "parameters": {}}; {"name": "add", "parameters": {}};',
        [Call("f", "{}"), Call("add", "{}")],
    ),
    (LlamaReader, 'So: <|python_tag|>{"name": "f", "parameters": {}}', ["So:", Call("f", "{}")]),
    (LlamaReader, 'So: {"name": "f", "parameters": {}}', ['So: {"name": "f", "parameters": {}}']),
    (LlamaReader, '{"name": "f", "parameters": {}};<|python_tag|>oh', [Call("f", "{}"), ";<|python_tag|>oh"]),
    (LlamaReader, '{"name": "f", "parameters": {}} ; <b>', [Call("f", "{}"), " ; <b>"]),
    # Mistral
    (
        MistralReader,
        'Ok [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}, '
        '{"name": "add", "arguments": {"a": 1}}] so',
        ["Ok", Call("f", "{}"), Call("add", '{"a": 1}'), " so"],
    ),
    (
        MistralReader,
        '[TOOL_CALLS]find-it[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}',
        [Call("find-it", '{"a": 1}'), Call("f", "{}")],
    ),
    (MistralReader, '[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}', [Call("f", '{"a": "[TOOL_CALLS]"}')]),
]
NO_CALLS: list[tuple[type[CallReader], str]] = [
    (HermesReader, '<tool_call>{"name": "f", "arguments": {}}}</tool_call>.'),
    (HermesReader, '<tool_call>{"name": "f", "arguments": {}} \n ]'),
    (HermesReader, '<tool_call>\n{"name": "f"}}\n</tool_call>\n'),
    (LlamaReader, '{"name": "f", "parameters": {"a": 1}}}'),
    (LlamaReader, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}\n]'),
    (MistralReader, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}}]'),
    (MistralReader, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}] ]'),
    (MistralReader, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]}'),
    (MistralReader, '[TOOL_CALLS]f[ARGS]{"a": 1}}'),
    (MistralReader, '[TOOL_CALLS]f{"a": 1}]'),
    (HermesReader, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call> rest'),
    (HermesReader, '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call> rest'),
    (HermesReader, '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    (HermesReader, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    *(
        (HermesReader, f'<tool_call>{{"name": "f", "arguments": {{"half a pair": "{half}"}}}}</tool_call>')
        for half in (r"\ud83d", r"\ud83dx", r"\ud83d\n", "\\ud83d\n", r"\ude42", r"\ud83d\ud83d")
    ),
    (HermesReader, "<tool_call>{'name': 'f'}</tool_call> \n"),
    (HermesReader, '<tool_call>{"name": "f", "arguments": {"a": tru'),
    (HermesReader, '<tool_call>{"name": "f", "na'),
    (HermesReader, " \n <tool_cal"),
    (HermesReader, '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 40 + "1" + "}" * 41 + "</tool_call>"),
    (LlamaReader, '{"name": "Bob", "age": 3}'),
    (LlamaReader, '{"name": "f", "age": 3}'),
    (LlamaReader, ' {"a'),
    (LlamaReader, "\n<|python_tag|>"),
    (LlamaReader, '<|python_tag|>print("f")'),
    (MistralReader, "[TOOL_CALLS] []"),
    (MistralReader, '[TOOL_CALLS]unknown[ARGS]{"a": 1}'),
    (MistralReader, '[TOOL_CALLS]f[ARGS]{"a": 1'),
    (MistralReader, "[TOOL_CALLS]" + "f" * 600 + "{}"),
]


def read(reader: CallReader, pieces: list[str]) -> list[Delta]:
    return [delta for piece in pieces for delta in reader.feed(piece)] + reader.end()


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(at % (len(text) + 1) for at in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize(("family", "text", "parts"), ANSWERS)
def test_calls_are_separated_from_content(family: type[CallReader], text: str, parts: Parts) -> None:
    for pieces in ([text], list(text), *(cut(text, [at]) for at in range(len(text)))):
        deltas = read(family(NAMES), pieces)
        assert assemble(deltas) == parts
        calls = [part for part in assemble(deltas) if isinstance(part, Call)]
        assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
        assert [delta.index for delta in deltas if isinstance(delta, CallEnded)] == list(range(len(calls)))


@pytest.mark.parametrize(("family", "text"), NO_CALLS)
def test_text_that_is_no_tool_call_is_content_without_loss(family: type[CallReader], text: str) -> None:
    for pieces in ([text], list(text), *(cut(text, [at]) for at in range(len(text)))):
        assert assemble(read(family(NAMES), pieces)) == [text]


SCRAPS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "f", "add", "true", "-1.5e3", "<"),
        *('{"name": "f", ', '"arguments": {', '"parameters": {"a": ', '{"name": "add", "arguments": {"a": [1]}}'),
        *("}", "}}", "[", "]", ",", ";", '"', "\\", "\n", " ", "é"),
    ]
)


@settings(max_examples=400)
@given(
    family=st.sampled_from([HermesReader, LlamaReader, MistralReader]),
    text=st.lists(SCRAPS, max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 200)),
    max_calls=st.sampled_from([None, 1]),
)
def test_any_cutting_gives_the_same_answer_of_valid_calls(
    family: type[CallReader], text: str, cuts: list[int], max_calls: int | None
) -> None:
    parts = assemble(read(family(NAMES, max_calls), [text]))
    assert assemble(read(family(NAMES, max_calls), cut(text, cuts))) == parts
    assert assemble(read(family(NAMES, max_calls), list(text))) == parts
    calls = [part for part in parts if isinstance(part, Call)]
    assert all(call.name in NAMES and isinstance(json.loads(call.arguments), dict) for call in calls)
    assert max_calls is None or len(calls) <= max_calls
    if not calls:
        assert "".join(map(str, parts)) == text


def test_a_call_comes_once_it_is_whole_and_content_without_delay() -> None:
    reader = HermesReader(NAMES)
    seen = [
        assembled_kinds(reader.feed(piece))
        for piece in ("Let me", " see <", '\n<tool_call>{"name": "f", "arguments": {"a', '": 1', "}}", "\n<")
    ]
    assert seen == [["Let me"], [" see"], [" <"], [], [], ["begun f", '{"a": 1}', "ended"]]


def assembled_kinds(deltas: list[Delta]) -> list[str]:
    return [
        f"begun {delta.name}"
        if isinstance(delta, CallBegun)
        else "ended"
        if isinstance(delta, CallEnded)
        else delta.text
        for delta in deltas
    ]


@pytest.mark.parametrize("family", [HermesReader, LlamaReader, MistralReader])
def test_no_more_than_a_bound_of_white_space_is_held_back(family: type[CallReader]) -> None:
    marks = {HermesReader: "<tool_call>", LlamaReader: "<|python_tag|>", MistralReader: "[TOOL_CALLS]["}
    text = "so" + " " * 300 + marks[family] + '{"name": "f", "arguments": {}}'
    for start, left in ((0, "so" + " " * 44), (2, " " * 44)):
        for pieces in ([text[start:]], list(text[start:])):
            assert assemble(read(family(NAMES), pieces)) == [left, Call("f", "{}")]
    reader = family(NAMES)
    given_out = [delta.text for _ in range(1000) for delta in reader.feed(" ") if isinstance(delta, Content)]
    assert len("".join(given_out)) >= 700


BREAKS = ["oh", "True}}", ",}}", "NaN}}", "Infinity}}", '"\\ud800"}}', "01}}", "[1}}", '"', "1", "1e999}}"]


@pytest.mark.parametrize("family", [HermesReader, LlamaReader, MistralReader])
@pytest.mark.parametrize("rest", BREAKS)
def test_a_call_that_breaks_is_content_however_it_comes(family: type[CallReader], rest: str) -> None:
    marks = {HermesReader: "<tool_call>", LlamaReader: "", MistralReader: "[TOOL_CALLS]["}
    text = marks[family] + '{"name": "f", "arguments": {"a": ' + rest
    for pieces in ([text], list(text)):
        deltas = read(family(NAMES), pieces)
        assert assemble(deltas) == [text]
        assert all(isinstance(delta, Content) for delta in deltas)


def test_calls_beyond_the_most_are_left_out() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"{call} and {call} and more"
    assert assemble(read(HermesReader(NAMES, 1), [text])) == [Call("f", "{}"), " and"]


@settings(max_examples=200)
@given(value=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8,
))  # fmt: skip
def test_any_json_object_is_taken_as_arguments(value: object) -> None:
    arguments = json.dumps({"value": value})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert assemble(read(HermesReader(NAMES), [text])) == [Call("f", arguments)]


@pytest.mark.parametrize("number", ["1e999", "-" + "9" * 4301])
def test_a_number_that_no_reader_of_json_takes_makes_no_call(number: str) -> None:
    scanner = JsonScanner()
    with pytest.raises(Malformed):
        for character in '{"n": ' + number + "}":
            scanner.advance(character)

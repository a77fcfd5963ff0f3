"""Thoughts before answers, however their text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_text.reasoning import ThoughtReader, num_thought_tokens, thoughts_of
from moiety_text.tools.deltas import Call, Thought, assemble
from moiety_text.tools.families import HermesReader

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CASES = {
    "a thought and an answer": ("<think>\nHm. \n a < b\n</think>\n\n Yes.", False, [Thought("Hm. \n a < b"), "Yes."]),
    "an empty thought": ("<think>\n\n</think>\n\nYes.", False, ["Yes."]),
    "no thought": ("Yes, <think>.", False, ["Yes, <think>."]),
    "white space and no thought": ("\n\n <thin", False, ["\n\n <thin"]),
    "a thought that the prompt has opened": ("\nHm.</think>Yes.</think>", True, [Thought("Hm."), "Yes.</think>"]),
    "a thought that was cut": ("<think>Hm. </thin", False, [Thought("Hm. </thin")]),
    "a thought and nothing": ("Hm.\n</think>\n\n", True, [Thought("Hm.")]),
    "nothing": ("", False, []),
    "a call in a thought and one after it": (
        f"<think>{CALL}</think>{CALL}",
        False,
        [Thought(CALL), Call("now", "{}")],
    ),
}


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_thoughts_are_told_apart_however_their_text_is_cut(name: str, data: st.DataObject) -> None:
    text, is_open, parts = CASES[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = ThoughtReader(HermesReader({"now"}), is_open=is_open)
    deltas = [
        delta
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
        for delta in reader.feed(text[begin:end])
    ]
    assert assemble([*deltas, *reader.end()]) == parts


def test_without_tools_the_rest_is_text() -> None:
    assert ThoughtReader(None).read("<think>Hm.</think>Yes.") == [Thought("Hm."), "Yes."]


def test_a_template_shows_whether_its_model_thinks() -> None:
    assert thoughts_of("{{ messages[0].content }}") is None
    always = thoughts_of("{{ messages[-1].content.split('</think>')[-1] }}<think>\n")
    switched = thoughts_of("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}")
    assert always is not None and not always.can_switch
    assert switched is not None and switched.can_switch
    assert always.new_reader("<|assistant|><think>\n", None).read("Hm.</think>Yes.") == [Thought("Hm."), "Yes."]


@pytest.mark.parametrize(
    ("token_ids", "is_open", "count"),
    [([1, 5, 6, 2, 7], False, 4), ([5, 2, 7], True, 2), ([5, 6], True, 2), ([5, 2, 7], False, 0), ([], True, 0)],
)
def test_tokens_of_thoughts_are_counted_with_their_markers(token_ids: list[int], is_open: bool, count: int) -> None:
    assert num_thought_tokens(token_ids, 1, 2, is_open=is_open) == count

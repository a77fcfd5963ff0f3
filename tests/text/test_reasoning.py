"""Reasoning before answers is separated from them, independently of the chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_text.chat import ChatTemplate
from moiety_text.reasoning import ThoughtReader, num_thought_tokens, thoughts_of
from moiety_text.tools.deltas import Call, Thought, assemble
from moiety_text.tools.families.hermes import HermesReader

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
def test_reasoning_is_separated_at_every_chunking(name: str, data: st.DataObject) -> None:
    text, is_open, parts = CASES[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = ThoughtReader(HermesReader({"now"}), is_open=is_open)
    deltas = [
        delta
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
        for delta in reader.feed(text[begin:end])
    ]
    assert assemble([*deltas, *reader.end()]) == parts


def test_text_after_reasoning_is_content_without_tools() -> None:
    assert ThoughtReader(None).read("<think>Hm.</think>Yes.") == [Thought("Hm."), "Yes."]


TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{% endfor %}"
PROMPT = TURNS + "{% if add_generation_prompt %}<|assistant|>"
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    f"{PROMPT}{{% if thinking %}}<think>{{% else %}}</think>{{% endif %}}{{% endif %}}"
)
QWEN = (
    f"{PROMPT}{{% if enable_thinking is defined and enable_thinking is false %}}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
EFFORT = (
    "{% set reasoning_effort = reasoning_effort if reasoning_effort is defined else 'none' %}"
    "{% if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('no such effort') }}{% endif %}"
    f"{PROMPT}{{% if reasoning_effort == 'high' %}}<think>{{% endif %}}{{% endif %}}"
)
BUDGET = (
    f"{PROMPT}{{% if thinking_budget is defined and thinking_budget == 0 %}}<think></think>{{% endif %}}{{% endif %}}"
)
MODE = f"{PROMPT}{{% if (thinking_mode or 'on') == 'off' %}}<think></think>{{% endif %}}{{% endif %}}"
SWITCHES = [
    # the template; what switches it on and off, and whether it is on by default
    (DEEPSEEK, ({"thinking": True}, {"thinking": False}, False)),
    (QWEN, ({"enable_thinking": True}, {"enable_thinking": False}, True)),
    (QWEN.replace("enable_thinking", "thinking"), ({"thinking": True}, {"thinking": False}, True)),
    (EFFORT, ({"reasoning_effort": "high"}, {"reasoning_effort": "none"}, False)),
    (BUDGET, ({}, {"thinking_budget": 0}, True)),
    (MODE, ({"thinking_mode": "on"}, {"thinking_mode": "off"}, True)),
    (f"{PROMPT}<think>\n{{% endif %}}", None),
    (f"{{# enable_thinking #}}{PROMPT}{{% set thinking = true %}}{{% endif %}}", None),  # it reads neither
    (f"{PROMPT}{{% if thinking %}}{{% endif %}}{{% endif %}}", None),  # it makes no difference
]


@pytest.mark.parametrize(("source", "expected"), SWITCHES)
def test_the_switch_of_a_template_is_what_it_reads(source: str, expected: tuple[object, object, bool] | None) -> None:
    found = thoughts_of(ChatTemplate(source, {}))
    assert found is not None
    switch = found.switch
    assert (None if switch is None else (switch.on, switch.off, switch.is_on_by_default)) == expected


def test_a_template_shows_whether_its_model_thinks() -> None:
    assert thoughts_of(ChatTemplate("{{ messages[0].content }}{# <think> #}", {})) is None
    always = thoughts_of(ChatTemplate("{{ messages[-1].content.split('</think>')[-1] }}<think>\n", {}))
    assert always is not None and always.switch is None
    assert always.new_reader("<|assistant|><think>\n", None).read("Hm.</think>Yes.") == [Thought("Hm."), "Yes."]


@pytest.mark.parametrize(
    ("token_ids", "is_open", "count"),
    [
        ([1, 5, 6, 2, 7], False, 4),
        ([5, 2, 7], True, 2),
        ([5, 6], True, 2),
        ([5, 2, 7], False, 0),
        ([], True, 0),
        ([9, 8, 1, 5, 2, 7], False, 5),
        ([9, 8], False, 0),
        ([9, 8], True, 2),
        ([9, 5, 1, 2], False, 0),
    ],
)
def test_tokens_of_thoughts_are_counted_with_their_markers(token_ids: list[int], is_open: bool, count: int) -> None:
    assert num_thought_tokens(token_ids, 1, 2, is_open=is_open, space_ids={8, 9}) == count

"""Shortened transcripts keep the first message of the user and the newest messages, within their limits."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.responses_api.transcript import (
    HEAD,
    LEFT_OUT,
    MAX_CHARACTERS,
    MESSAGE_PART,
    MIN_CHARACTERS,
    shortened_transcript,
)

NOTE_CHARACTERS = 60  # "[N messages left out]", and the line ends around it


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def test_a_short_conversation_is_complete() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        message("system", "rules"),
        message("user", [{"type": "text", "text": "look"}, {"type": "image"}]),
        message("assistant", "", tool_calls=[call]),
        message("tool", "found\n", tool_call_id="c"),
    ]
    expected = 'system: rules\nuser: look\n[image]\nassistant: calls f({"x":1})\ntool: found'
    assert shortened_transcript(messages, 10) == HEAD + expected


def test_a_long_conversation_keeps_its_first_and_its_newest_messages() -> None:
    messages = [message("system", "rules"), message("user", "the task")]
    messages += [message("assistant", f"step {number}") for number in range(1000)]
    lines = shortened_transcript(messages, 0).removeprefix(HEAD).split("\n")
    assert lines[0] == "user: the task" and lines[-1] == "assistant: step 999"
    num_kept = len(lines) - 2
    assert lines[1] == f"[{1001 - num_kept} messages left out]"
    assert lines[2:] == [f"assistant: step {number}" for number in range(1000 - num_kept, 1000)]


def test_a_long_message_loses_its_middle() -> None:
    (line,) = shortened_transcript([message("user", "a" * 9000 + "z")], 0).removeprefix(HEAD).split("\n")
    assert line.startswith("user: aaa") and line.endswith("az") and LEFT_OUT in line
    assert len(line) <= MIN_CHARACTERS // MESSAGE_PART


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=3000)), min_size=1),
    st.integers(0, 100_000),
)
def test_a_transcript_stays_within_its_limit(messages: list[tuple[str, str]], num_tokens: int) -> None:
    found = shortened_transcript([message(*one) for one in messages], num_tokens)
    most = min(MAX_CHARACTERS, max(MIN_CHARACTERS, num_tokens))
    assert found.startswith(HEAD) and len(found) <= len(HEAD) + most + NOTE_CHARACTERS

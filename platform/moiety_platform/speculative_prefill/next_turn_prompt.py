"""Prefix of the next turn's prompt that does not depend on its message. Pure.

The prefix is the conversation and its answer as the model's template writes them in a later prompt, up to the new
message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from moiety_platform.inference.generation import Conversation
from moiety_text.tools.deltas import Call, Parts

_CALL_ID = "call_0"
_WORDS = ("A", "7")  # two messages without a common prefix


def next_turns(conversation: Conversation, answer: Parts) -> tuple[Conversation, Conversation]:
    """Return the conversation's next turn with two different messages.

    After tool calls the message is the result of the first call. Reasoning is omitted, as clients and templates do.
    """
    calls = [part for part in answer if isinstance(part, Call)]
    text = "".join(part for part in answer if isinstance(part, str))
    said: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}  # as clients send it back
    if calls:
        said["tool_calls"] = [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for index, call in enumerate(calls)
        ]
    first, second = (_with(conversation, said, word, has_called=bool(calls)) for word in _WORDS)
    return first, second


def has_called(answer: Parts) -> bool:
    return any(isinstance(part, Call) for part in answer)


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix in tokens."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def _with(conversation: Conversation, said: dict[str, Any], word: str, *, has_called: bool) -> Conversation:
    new = {"role": "user", "content": word}
    if has_called:
        new = {"role": "tool", "content": word, "tool_call_id": _CALL_ID}
    return msgspec.structs.replace(conversation, messages=(*conversation.messages, said, new))

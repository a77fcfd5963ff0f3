"""What the prompt of a conversation's next turn begins with, whatever will be said in it: the conversation and its
answer as the model's template writes them in a later prompt, up to where the new words stand. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from moiety_platform.inference.generation import Conversation
from moiety_text.tools.deltas import Call, Parts

_CALL_ID = "call_0"
_WORDS = ("A", "7")  # two next turns that have nothing in common but what comes before them


def next_turns(asked: Conversation, answer: Parts) -> tuple[Conversation, Conversation]:
    """The conversation's next turn with one message and with another. After calls of tools it is the result of the
    first. Thoughts are left out, as clients and templates do."""
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
    first, second = (_with(asked, said, word, has_called=bool(calls)) for word in _WORDS)
    return first, second


def has_called(answer: Parts) -> bool:
    return any(isinstance(part, Call) for part in answer)


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def _with(asked: Conversation, said: dict[str, Any], word: str, *, has_called: bool) -> Conversation:
    new = {"role": "user", "content": word}
    if has_called:
        new = {"role": "tool", "content": word, "tool_call_id": _CALL_ID}
    return msgspec.structs.replace(asked, messages=(*asked.messages, said, new))

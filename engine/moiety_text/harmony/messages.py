"""Messages in the form that gpt-oss's chat template expects.

The template knows one instruction, which is the first message, and one call in a message of the assistant, whose
reasoning it takes as `thinking` instead of text, not beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_INSTRUCTIONS = ("system", "developer")
_BETWEEN = "\n\n"


def adapted(messages: Sequence[Message]) -> list[Message]:
    """Return the messages for the template. A later instruction becomes a message of the user."""
    left = deque(messages)
    instructions = []
    while left and left[0]["role"] in _INSTRUCTIONS:
        instructions.append(left.popleft()["content"] or "")
    found: list[Message] = []
    if instructions:
        found.append({"role": "system", "content": _BETWEEN.join(filter(None, instructions))})
    while left:
        message = left.popleft()
        if message["role"] in _INSTRUCTIONS:
            found.append({**message, "role": "user"})
        elif not message.get("tool_calls"):
            found.append(_without_reasoning(message))
        else:
            results = []
            while left and left[0]["role"] == "tool":
                results.append(left.popleft())
            found += _calls(message, results)
    return found


def _without_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}


def _calls(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """Yield each call in its own message, followed by its result.

    The reasoning, and the text before the calls, are told as reasoning before the first call.
    """
    thoughts = (message.get("reasoning_content"), message.get("content"))
    thinking = _BETWEEN.join(filter(None, thoughts))
    told = set()
    for number, call in enumerate(message["tool_calls"]):
        yield {"role": "assistant", "tool_calls": [call], **({"thinking": thinking} if thinking and not number else {})}
        for place, result in enumerate(results):
            if place not in told and result.get("tool_call_id") == call["id"]:
                told.add(place)
                yield result
    yield from [result for place, result in enumerate(results) if place not in told]

"""Tool calls and reasoning in the message of OpenAI's chat answers."""

from __future__ import annotations

import secrets

from moiety_platform.openai_api.answer_types import CALLED, AssistantMessage
from moiety_text.tools.deltas import Call, Parts, Thought
from moiety_wire.messages import Finished, FinishReason


def message_of(parts: Parts) -> AssistantMessage:
    """Return the message of an answer with or without tool calls.

    Content is null if there are only calls or reasoning.
    """
    calls = [part for part in parts if isinstance(part, Call)]
    content = "".join([part for part in parts if isinstance(part, str)])
    thought = "".join([part.text for part in parts if isinstance(part, Thought)])
    message: AssistantMessage = {
        "role": "assistant",
        "content": content or (None if calls or thought else ""),
        "refusal": None,
    }
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": new_call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def has_called(parts: Parts) -> bool:
    return any(isinstance(part, Call) for part in parts)


def finish_reason_of(finished: Finished, has_called: bool) -> str:
    """Return "tool_calls" for an answer with calls and the finish reason STOP, otherwise the engine's finish reason."""
    return CALLED if has_called and finished.reason is FinishReason.STOP else str(finished.reason)


def new_call_id() -> str:
    """Return a new unique id for a tool call."""
    return f"call_{secrets.token_hex(12)}"

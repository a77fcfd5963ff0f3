"""Calls of tools and thoughts in OpenAI's message of an answer to a chat."""

from __future__ import annotations

import secrets

from moiety_platform.openai_api.answer_types import CALLED, AssistantMessage
from moiety_text.tools.deltas import Call, Parts, Thought
from moiety_wire.messages import Finished, FinishReason


def message_of(parts: Parts) -> AssistantMessage:
    """The message of an answer with calls, or without. Beside calls or a thought there need be no content."""
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
    """An answer that its limit has cut says so, whatever it has called."""
    return CALLED if has_called and finished.reason is FinishReason.STOP else str(finished.reason)


def new_call_id() -> str:
    """Of a call that is answered with; nobody else has it."""
    return f"call_{secrets.token_hex(12)}"

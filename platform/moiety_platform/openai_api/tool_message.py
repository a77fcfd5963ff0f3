"""Tool calls and reasoning in the message of OpenAI's chat answers."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass

from moiety_platform.inference.custom_tools import input_of
from moiety_platform.openai_api.answer_types import (
    CALLED,
    CALLED_FUNCTION,
    AnswerCall,
    AnswerCustomTool,
    AnswerFunction,
    AssistantMessage,
)
from moiety_text.tools.deltas import Call, Parts, Thought
from moiety_wire.messages import Finished, FinishReason


@dataclass(frozen=True, slots=True)
class MessageForm:
    """Form of the messages that answer a request."""

    custom_names: Collection[str] = ()  # tools whose calls have the type "custom"
    is_older: bool = False  # the request has `functions`: a call is answered in `function_call`
    shows_reasoning: bool = True

    def message_of(self, parts: Parts) -> AssistantMessage:
        """Return the message of an answer with or without tool calls.

        Content is null if there are only calls or reasoning.
        """
        if len(parts) == 1 and isinstance(parts[0], str):  # the common case
            return {"role": "assistant", "content": parts[0], "refusal": None}
        calls = [part for part in parts if isinstance(part, Call)]
        content = "".join([part for part in parts if isinstance(part, str)])
        thought = "".join([part.text for part in parts if isinstance(part, Thought)])
        message: AssistantMessage = {
            "role": "assistant",
            "content": content or (None if calls or thought else ""),
            "refusal": None,
        }
        if thought and self.shows_reasoning:
            message["reasoning_content"] = message["reasoning"] = thought
        if calls and self.is_older:
            message["function_call"] = {"name": calls[0].name, "arguments": calls[0].arguments}
        elif calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        return message

    def finish_reason_of(self, finished: Finished, has_called: bool) -> str:
        """Return the finish reason of an answer.

        An answer with calls that ends by itself has a reason of its own. Otherwise it is the engine's.
        """
        if not has_called or finished.reason is not FinishReason.STOP:
            return str(finished.reason)
        return CALLED_FUNCTION if self.is_older else CALLED

    def _call(self, call: Call) -> AnswerCall:
        if call.name in self.custom_names:
            custom: AnswerCustomTool = {"name": call.name, "input": input_of(call.arguments)}
            return {"id": new_call_id(), "type": "custom", "custom": custom}
        function: AnswerFunction = {"name": call.name, "arguments": call.arguments}
        return {"id": new_call_id(), "type": "function", "function": function}


def has_called(parts: Parts) -> bool:
    for part in parts:  # noqa: SIM110  of every answer, and a generator would cost more calls
        if isinstance(part, Call):
            return True
    return False


def new_call_id() -> str:
    """Return a new unique id for a tool call."""
    return f"call_{secrets.token_hex(12)}"

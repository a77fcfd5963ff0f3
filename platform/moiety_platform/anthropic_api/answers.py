"""Messages as `/v1/messages` answers them: whole, or in events.

The tokens of a prompt that were found in the prefix cache are told apart from its other input tokens, as Anthropic's
clients expect; together they are what `count_tokens` counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from moiety_platform.anthropic_api.answer_types import AnswerBlock, Message, MessageStop, StopReason, TokenUsage
from moiety_platform.inference.run import Usage
from moiety_wire.messages import Finished, FinishReason, TokenLogprob

_Tier = Literal["priority", "standard", "batch"]

_TIERS: Mapping[str, _Tier] = {"priority": "priority", "default": "standard", "flex": "batch"}  # by OpenAI's words

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_BLOCK_START = (
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
    b'"content_block":{"type":"text","text":""}}\n\n'
)
_DELTA_START = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
_DELTA_END = b"}}\n\n"
_BLOCK_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class MessageHead:
    """What is known of an answer before it begins."""

    message_id: str
    model: str
    served_tier: str  # in OpenAI's words
    stop_sequences: Sequence[str]

    def fields(self, content: list[AnswerBlock], stop: MessageStop, usage: Usage) -> Message:
        """The message."""
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **stop,
            "usage": {**_usage_fields(usage), "service_tier": _TIERS[self.served_tier]},
        }

    def stop_fields(self, finished: Finished, *, has_called: bool = False) -> MessageStop:
        """Why it ended. A limit that has nothing left counts as `max_tokens`."""
        if finished.reason is FinishReason.LENGTH:
            return _stop_fields("max_tokens")
        if finished.reason is FinishReason.CONTENT_FILTER:
            return _stop_fields("refusal")
        if finished.detail in self.stop_sequences:
            return _stop_fields("stop_sequence", finished.detail)
        return _stop_fields("tool_use" if has_called else "end_turn")


def whole_message(head: MessageHead, content: list[AnswerBlock], finished: Finished, usage: Usage) -> bytes:
    """An answer that is not streamed, of the blocks in `content`."""
    has_called = any(block["type"] == "tool_use" for block in content)
    return _encode(head.fields(content, head.stop_fields(finished, has_called=has_called), usage))


class MessageEvents:
    """The events of a streamed answer: one message of one text block. How much of the prompt was cached is known at its
    end, so `message_delta` repeats the input tokens that `message_start` told."""

    def __init__(self, head: MessageHead, num_prompt_tokens: int) -> None:
        self._head = head
        self._num_prompt_tokens = num_prompt_tokens
        self._stop = _stop_fields(None)

    def opening(self, index: int) -> bytes:
        return self._start() + _BLOCK_START + PING

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        return _DELTA_START + _encode(text) + _DELTA_END

    def closing(self, index: int, finished: Finished) -> bytes:
        self._stop = self._head.stop_fields(finished)
        return _BLOCK_STOP

    def end(self, usage: Usage) -> bytes:
        return event("message_delta", {"delta": self._stop, "usage": _usage_fields(usage)}) + _MESSAGE_STOP

    def _start(self) -> bytes:
        usage = Usage(self._num_prompt_tokens, cached_tokens=0, output_tokens=0)
        return event("message_start", {"message": self._head.fields([], self._stop, usage)})


def _stop_fields(reason: StopReason | None, sequence: str | None = None) -> MessageStop:
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage_fields(usage: Usage) -> TokenUsage:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


def event(kind: str, fields: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))

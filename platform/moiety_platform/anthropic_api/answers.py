"""Answers of `/v1/messages`: complete, or as events.

Prompt tokens read from the prefix cache are reported apart from the other input tokens, as Anthropic's clients expect.
The sum of both is what `count_tokens` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from moiety_platform.anthropic_api.answer_types import (
    AnswerBlock,
    ContextManagementResult,
    Message,
    MessageStop,
    StopReason,
    TokenUsage,
)
from moiety_platform.inference.run import CREDIT_REFUSED, Usage
from moiety_wire.messages import Finished, FinishReason, TokenLogprob

_Tier = Literal["priority", "standard", "batch"]

_TIERS: Mapping[str, _Tier] = {
    "priority": "priority",
    "default": "standard",
    "flex": "batch",
    "spot": "batch",
}  # by OpenAI's names

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
    """Fields of an answer that are known before it begins."""

    message_id: str
    model: str
    served_tier: str  # as OpenAI names it
    stop_sequences: Sequence[str]
    is_clamped: bool = False  # whether the model's context allows fewer output tokens than requested
    marks_end: bool = False  # whether the request asks to cache its whole prompt
    omits_thinking: bool = False  # whether reasoning is returned without its text
    context_management: ContextManagementResult | None = None  # if the request has it

    def fields(self, content: list[AnswerBlock], stop: MessageStop, usage: Usage) -> Message:
        """Return the message."""
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop["stop_reason"],
            "stop_sequence": stop["stop_sequence"],
            "usage": {**self.usage_fields(usage), "service_tier": _TIERS[self.served_tier]},
        }

    def usage_fields(self, usage: Usage) -> TokenUsage:
        """Return the billed tokens. Tokens of a prompt that is to be cached count as cached now, if they were not."""
        uncached = usage.prompt_tokens - usage.cached_tokens
        fields: TokenUsage = {
            "input_tokens": 0 if self.marks_end else uncached,
            "cache_creation_input_tokens": uncached if self.marks_end else 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        }
        if usage.reasoning_tokens is not None:
            fields["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
        return fields

    def stop_fields(self, finished: Finished, *, has_called: bool = False) -> MessageStop:
        """Return why the message ended. An exhausted quota counts as `max_tokens`."""
        if finished.reason is FinishReason.LENGTH:
            by_context = self.is_clamped and finished.detail != CREDIT_REFUSED
            return _stop_fields("model_context_window_exceeded" if by_context else "max_tokens")
        if finished.reason is FinishReason.CONTENT_FILTER:
            return _stop_fields("refusal")
        if finished.detail in self.stop_sequences:
            return _stop_fields("stop_sequence", finished.detail)
        return _stop_fields("tool_use" if has_called else "end_turn")


def whole_message(head: MessageHead, content: list[AnswerBlock], finished: Finished, usage: Usage) -> bytes:
    """Return an answer that is not streamed, with the blocks in `content`."""
    has_called = any(block["type"] == "tool_use" for block in content)
    message = head.fields(content, head.stop_fields(finished, has_called=has_called), usage)
    if head.context_management is not None:
        message["context_management"] = head.context_management
    return _encode(message)


class MessageEvents:
    """Encoder of a streamed answer: one message with one text block.

    The number of cached prompt tokens is known only at the end, so `message_delta` repeats the input tokens of
    `message_start`.
    """

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
        fields: dict[str, Any] = {"delta": self._stop, "usage": self._head.usage_fields(usage)}
        if self._head.context_management is not None:
            fields["context_management"] = self._head.context_management
        return event("message_delta", fields) + _MESSAGE_STOP

    def _start(self) -> bytes:
        usage = Usage(self._num_prompt_tokens, cached_tokens=0, output_tokens=0)
        return event("message_start", {"message": self._head.fields([], self._stop, usage)})


def _stop_fields(reason: StopReason | None, sequence: str | None = None) -> MessageStop:
    return {"stop_reason": reason, "stop_sequence": sequence}


def event(kind: str, fields: dict[str, Any]) -> bytes:
    """Return one encoded event of a stream."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))

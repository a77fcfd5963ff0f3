"""Types of Anthropic's answers, used to build the answers and to generate the OpenAPI schema."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from moiety_platform.anthropic_api.errors import AnthropicErrorBody
from moiety_platform.openapi.schemas import either

Count = Annotated[int, Meta(extra_json_schema={"minimum": 0})]


class AnswerTextBlock(TypedDict):
    """Text of an answer."""

    type: Literal["text"]
    text: str


class AnswerThinkingBlock(TypedDict):
    """Reasoning of the model before its answer. The text is empty where the request omits it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnswerToolUseBlock(TypedDict):
    """A tool call for the client to execute."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[Any, Meta(extra_json_schema={"type": "object"})]


AnswerBlock = AnswerTextBlock | AnswerThinkingBlock | AnswerToolUseBlock
_AnswerBlock = Annotated[Any, either(AnswerTextBlock, AnswerThinkingBlock, AnswerToolUseBlock)]
StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use", "refusal"]


class MessageStop(TypedDict):
    """Why a message ended, null until then. `stop_sequence` is the stop sequence that ended it, if any."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class OutputTokenKinds(TypedDict):
    """Output tokens by kind."""

    thinking_tokens: Count


class TokenUsage(TypedDict):
    """Billed tokens: uncached input, input to be cached, input read from the prefix cache, and output."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: NotRequired[OutputTokenKinds]  # of a model that reasons


class MessageUsage(TokenUsage):
    """Billed tokens and the tier that served the request."""

    service_tier: Literal["priority", "standard", "batch"]


class ClearedReasoning(TypedDict):
    """Reasoning of earlier answers that the model did not read."""

    type: Literal["clear_thinking_20251015"]
    cleared_thinking_turns: Count
    cleared_input_tokens: Count


class ClearedToolUses(TypedDict):
    """Tool uses whose results, and maybe inputs, the model did not read."""

    type: Literal["clear_tool_uses_20250919"]
    cleared_tool_uses: Count
    cleared_input_tokens: Count


class ContextManagementResult(TypedDict):
    """The edits that have changed the conversation, of those in the request."""

    applied_edits: list[Annotated[Any, either(ClearedReasoning, ClearedToolUses)]]


class Message(MessageStop):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[_AnswerBlock]
    usage: MessageUsage
    context_management: NotRequired[ContextManagementResult]  # if the request has it


class MessageStart(TypedDict):
    """The first event: the message without its content."""

    type: Literal["message_start"]
    message: Message


class ContentBlockStart(TypedDict):
    """A block begins."""

    type: Literal["content_block_start"]
    index: Count
    content_block: _AnswerBlock


class Ping(TypedDict):
    """Keep-alive event."""

    type: Literal["ping"]


class TextDelta(TypedDict):
    """More text of a block."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """More text of the reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    """Signature of the reasoning, after its text."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(TypedDict):
    """More of a call's input, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(TypedDict):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: Count
    delta: Annotated[Any, either(TextDelta, ThinkingDelta, SignatureDelta, InputJsonDelta)]


class ContentBlockStop(TypedDict):
    """A block is complete."""

    type: Literal["content_block_stop"]
    index: Count


class MessageDelta(TypedDict):
    """Why the message ended, and all billed tokens."""

    type: Literal["message_delta"]
    delta: MessageStop
    usage: TokenUsage
    context_management: NotRequired[ContextManagementResult]  # if the request has it


class MessageEnd(TypedDict):
    """The last event."""

    type: Literal["message_stop"]


class CountedContext(TypedDict):
    """Number of input tokens before the edits of the conversation."""

    original_input_tokens: Count


class TokenCount(TypedDict):
    """Number of input tokens of a conversation, after its edits."""

    input_tokens: Count
    context_management: NotRequired[CountedContext]  # if the request has it


EVENTS: Mapping[str, type] = MappingProxyType(
    {
        "message_start": MessageStart,
        "content_block_start": ContentBlockStart,
        "ping": Ping,
        "content_block_delta": ContentBlockDelta,
        "content_block_stop": ContentBlockStop,
        "message_delta": MessageDelta,
        "message_stop": MessageEnd,
        "error": AnthropicErrorBody,
    }
)
"""Event types by name. A stream that fails ends with `error`."""

"""Types of OpenAI's responses and their events, used to generate the OpenAPI schema.

The answers themselves are built as plain dicts (`answers.py`, `items.py`, `events.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from moiety_platform.openai_api.answer_types import ChatTokenLogprob, Count, Tier
from moiety_platform.openapi.schemas import either, shows
from moiety_platform.responses_api.item_types import (
    InputItem,
    InputMessage,
    OfferedToolFields,
    OutputItem,
    OutputText,
    ResponseChosen,
    ResponseCompaction,
)


class InputItemList(TypedDict):
    """One page of a response's input items. `has_more` says whether others follow after `last_id`."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseError(TypedDict):
    """Why a response failed."""

    code: Literal["rate_limit_exceeded", "server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseInputDetails(TypedDict):
    """Input tokens that were read from the prefix cache."""

    cached_tokens: Count
    cache_write_tokens: Count


class ResponseOutputDetails(TypedDict):
    """Output tokens of the reasoning before the answer, if they can be counted."""

    reasoning_tokens: Count


class ResponseUsage(TypedDict):
    """Billed tokens."""

    input_tokens: Count
    input_tokens_details: ResponseInputDetails
    output_tokens: Count
    output_tokens_details: ResponseOutputDetails
    total_tokens: Count


class PlainFormat(TypedDict):
    """Text without a response format."""

    type: Literal["text"]


class ObjectFormat(TypedDict):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(TypedDict):
    """JSON that follows a schema. The schema is always enforced."""

    type: Literal["json_schema"]
    name: str
    schema: dict[str, Any]
    description: str | None
    strict: Literal[True]


TextFormatFields = Annotated[Any, either(PlainFormat, ObjectFormat, SchemaFormat)]


class ResponseText(TypedDict):
    """Text options of the request."""

    format: TextFormatFields
    verbosity: Literal["medium"]


class ResponseReasoning(TypedDict):
    """Reasoning options of the request."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    summary: None


class ResponseConversation(TypedDict):
    """The conversation to which the items of a response were added."""

    id: str


class ResponseObject(TypedDict):
    """A response with the options of its request.

    Times are Unix seconds. `service_tier` is the tier that served it, and `store` says whether it is stored.
    """

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    conversation: ResponseConversation | None
    background: bool
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Tier | None
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: Literal["none", "auto", "required"] | ResponseChosen
    tools: list[OfferedToolFields]
    top_logprobs: Count
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]


class CompactedResponse(TypedDict):
    """A compacted conversation."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Annotated[Any, either(InputMessage, ResponseCompaction)]]
    usage: ResponseUsage


class InputTokens(TypedDict):
    """The number of tokens of a conversation."""

    object: Literal["response.input_tokens"]
    input_tokens: Count


class DeletedResponse(TypedDict):
    """A deleted response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class _Event(TypedDict):
    """Base of all events. Each event has the next sequence number."""

    sequence_number: Count


class ResponseCreated(_Event):
    """The first event."""

    type: Literal["response.created"]
    response: ResponseObject


class ResponseInProgress(_Event):
    """The second event."""

    type: Literal["response.in_progress"]
    response: ResponseObject


class OutputItemAdded(_Event):
    """An item begins: a message without parts, or a call without arguments."""

    type: Literal["response.output_item.added"]
    output_index: Count
    item: OutputItem


class OutputItemDone(_Event):
    """An item is complete."""

    type: Literal["response.output_item.done"]
    output_index: Count
    item: OutputItem


class _ItemEvent(_Event):
    """Event of an item in progress."""

    item_id: str
    output_index: Count


class _PartEvent(_ItemEvent):
    """Event of an item's only content part."""

    content_index: Annotated[int, shows(const=0)]


class ContentPartAdded(_PartEvent):
    """The text of a message begins."""

    type: Literal["response.content_part.added"]
    part: OutputText


class OutputTextDelta(_PartEvent):
    """More text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(_PartEvent):
    """The text is complete."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatTokenLogprob]


class ContentPartDone(_PartEvent):
    """The part is complete."""

    type: Literal["response.content_part.done"]
    part: OutputText


class ReasoningTextDelta(_PartEvent):
    """More text of the reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(_PartEvent):
    """The reasoning is complete."""

    type: Literal["response.reasoning_text.done"]
    text: str


class CallArgumentsDelta(_ItemEvent):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class CallArgumentsDone(_ItemEvent):
    """The arguments of a call are complete."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomInputDelta(_ItemEvent):
    """More of a custom tool's input."""

    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomInputDone(_ItemEvent):
    """The input of a custom tool is complete."""

    type: Literal["response.custom_tool_call_input.done"]
    input: str


class _CommandEvent(_Event):
    """Event of a command of a shell call."""

    output_index: Count
    command_index: Count


class CommandAdded(_CommandEvent):
    """A command begins."""

    type: Literal["response.shell_call_command.added"]
    command: str


class CommandDelta(_CommandEvent):
    """More of a command."""

    type: Literal["response.shell_call_command.delta"]
    delta: str


class CommandDone(_CommandEvent):
    """A command is complete."""

    type: Literal["response.shell_call_command.done"]
    command: str


class ResponseCompleted(_Event):
    """The last event of a response that the model ended itself."""

    type: Literal["response.completed"]
    response: ResponseObject


class ResponseIncomplete(_Event):
    """The last event of a response that a limit or the content filter ended."""

    type: Literal["response.incomplete"]
    response: ResponseObject


class ResponseBroken(TypedDict):
    """Why a stream failed, with our stable error code. If the response failed, `response.failed` follows.

    In a resumed stream it has the number of the last event sent, and none before the first one.
    """

    sequence_number: NotRequired[Count]
    type: Literal["error"]
    code: str
    message: str
    param: str | None


class ResponseFailed(_Event):
    """The last event of a response that failed."""

    type: Literal["response.failed"]
    response: ResponseObject


EVENTS: Mapping[str, type] = MappingProxyType(
    {
        "response.created": ResponseCreated,
        "response.in_progress": ResponseInProgress,
        "response.output_item.added": OutputItemAdded,
        "response.content_part.added": ContentPartAdded,
        "response.output_text.delta": OutputTextDelta,
        "response.output_text.done": OutputTextDone,
        "response.reasoning_text.delta": ReasoningTextDelta,
        "response.reasoning_text.done": ReasoningTextDone,
        "response.content_part.done": ContentPartDone,
        "response.function_call_arguments.delta": CallArgumentsDelta,
        "response.function_call_arguments.done": CallArgumentsDone,
        "response.custom_tool_call_input.delta": CustomInputDelta,
        "response.custom_tool_call_input.done": CustomInputDone,
        "response.shell_call_command.added": CommandAdded,
        "response.shell_call_command.delta": CommandDelta,
        "response.shell_call_command.done": CommandDone,
        "response.output_item.done": OutputItemDone,
        "response.completed": ResponseCompleted,
        "response.incomplete": ResponseIncomplete,
        "error": ResponseBroken,
        "response.failed": ResponseFailed,
    }
)
"""Event types by name."""

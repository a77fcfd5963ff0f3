"""Types of OpenAI's text answers, used to build the answers and to generate the OpenAPI schema."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from msgspec import Meta

from moiety_wire.messages import FinishReason

Count = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
_REASONS = [reason.value for reason in FinishReason if reason is not FinishReason.PREFILL_DONE]
CALLED = "tool_calls"  # finish reason of an answer with tool calls
CALLED_FUNCTION = "function_call"  # the same in OpenAI's older form

FinishReasonText = Annotated[str, Meta(extra_json_schema={"enum": _REASONS})]
ChatFinishReasonText = Annotated[str, Meta(extra_json_schema={"enum": [*_REASONS, CALLED, CALLED_FUNCTION]})]
Tier = Annotated[str, Meta(extra_json_schema={"enum": ["default", "flex", "priority", "spot"]})]


class PromptTokensDetails(TypedDict):
    """Prompt tokens that were read from the prefix cache."""

    cached_tokens: Count


class CompletionTokensDetails(TypedDict):
    """Output tokens of the reasoning before the answer. They are billed like other output tokens."""

    reasoning_tokens: Count


class CompletionUsage(TypedDict):
    """Billed tokens."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class AnswerFields(TypedDict):
    """Fields common to every answer and chunk of a request. `service_tier` is the tier that served it."""

    id: str
    object: str
    created: int
    model: str
    service_tier: Tier
    system_fingerprint: str


class TopLogprob(TypedDict):
    """An alternative token."""

    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprob(TypedDict):
    """A token and its most likely alternatives."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log probabilities of the tokens of the text."""

    content: list[ChatTokenLogprob]
    refusal: None


class AnswerFunction(TypedDict):
    """A function name and its arguments, a JSON object as text."""

    name: str
    arguments: str


class AnswerCustomTool(TypedDict):
    """A custom tool's name and its input, a text."""

    name: str
    input: str


class AnswerCall(TypedDict):
    """A tool call for the client to execute. It has the field that its type names."""

    id: str
    type: Literal["function", "custom"]
    function: NotRequired[AnswerFunction]
    custom: NotRequired[AnswerCustomTool]


class AssistantMessage(TypedDict):
    """The assistant's message.

    Content can be null beside tool calls, or when a limit cuts the answer within its reasoning.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]  # the same
    tool_calls: NotRequired[list[AnswerCall]]
    function_call: NotRequired[AnswerFunction]  # to a request with `functions`


class ChatChoice(TypedDict):
    """One of `n` answers."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReasonText
    token_ids: NotRequired[list[Count]]  # with `return_token_ids`


class PromptLogprob(TypedDict):
    """A token at one place of a prompt. Its rank is 1 for the most likely token."""

    logprob: float
    rank: Count
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatCompletion(AnswerFields):
    """A complete chat answer."""

    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: NotRequired[PromptLogprobs]  # with `prompt_logprobs`; null for the first token
    prompt_token_ids: NotRequired[list[Count]]  # with `return_token_ids`


class FunctionDelta(TypedDict):
    """The function's name in the first delta, then further parts of its arguments."""

    name: NotRequired[str]
    arguments: str


class CustomToolDelta(TypedDict):
    """The custom tool's name in the first delta, then its input."""

    name: NotRequired[str]
    input: str


class CallDelta(TypedDict):
    """A part of the tool call number `index`. The first part has its id and type."""

    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionDelta]
    custom: NotRequired[CustomToolDelta]


class ChatDelta(TypedDict):
    """New parts of a chat message: `role` in the first chunk, nothing in the last.

    Content is null in the first chunk of an answer that may contain tool calls or reasoning.
    """

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]  # the same
    tool_calls: NotRequired[list[CallDelta]]
    function_call: NotRequired[FunctionDelta]  # to a request with `functions`


class ChatChunkChoice(TypedDict):
    """A part of one of `n` answers. The last part has the `finish_reason`."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReasonText | None
    token_ids: NotRequired[list[Count]]  # with `return_token_ids`


class ChatCompletionChunk(AnswerFields):
    """A part of a chat answer.

    With `stream_options.include_usage` every chunk has `usage`, null except in the last. With `continuous_usage_stats`
    every chunk has the usage so far.
    """

    choices: list[ChatChunkChoice]
    usage: NotRequired[CompletionUsage | None]
    prompt_token_ids: NotRequired[list[Count]]  # with `return_token_ids`


class TextLogprobs(TypedDict):
    """The tokens of the text and the offset of each. The log probability of a prompt's first token is null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class TextChoice(TypedDict):
    """One of `n` texts for each prompt."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReasonText
    prompt_logprobs: NotRequired[PromptLogprobs]  # with `prompt_logprobs`; null for the first token
    prompt_token_ids: NotRequired[list[Count]]  # with `return_token_ids`
    token_ids: NotRequired[list[Count]]  # with `return_token_ids`


class TextCompletion(AnswerFields):
    """Complete texts."""

    choices: list[TextChoice]
    usage: CompletionUsage


class TextChunkChoice(TypedDict):
    """A part of one text. The last part has the `finish_reason`."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReasonText | None
    prompt_token_ids: NotRequired[list[Count]]  # with `return_token_ids`
    token_ids: NotRequired[list[Count]]  # with `return_token_ids`


class TextCompletionChunk(AnswerFields):
    """A part of the texts.

    With `stream_options.include_usage` every chunk has `usage`, null except in the last. With `continuous_usage_stats`
    every chunk has the usage so far.
    """

    choices: list[TextChunkChoice]
    usage: NotRequired[CompletionUsage | None]

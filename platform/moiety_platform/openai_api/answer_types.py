"""What OpenAI's answers of text look like: the types that they are made as, and that the OpenAPI shows."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from msgspec import Meta

from moiety_wire.messages import FinishReason

Count = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
_REASONS = [reason.value for reason in FinishReason if reason is not FinishReason.PREFILL_DONE]
CALLED = "tool_calls"  # why an answer ended that calls

FinishReasonText = Annotated[str, Meta(extra_json_schema={"enum": _REASONS})]
ChatFinishReasonText = Annotated[str, Meta(extra_json_schema={"enum": [*_REASONS, CALLED]})]
Tier = Annotated[str, Meta(extra_json_schema={"enum": ["default", "flex", "priority"]})]


class PromptTokensDetails(TypedDict):
    """Prompt tokens that the prefix cache held."""

    cached_tokens: Count


class CompletionTokensDetails(TypedDict):
    """Output tokens that the model thought with before it answered; they are billed as the others."""

    reasoning_tokens: Count


class CompletionUsage(TypedDict):
    """What is billed."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class AnswerFields(TypedDict):
    """What every answer and chunk of a request repeats. `service_tier` is the one that was served."""

    id: str
    object: str
    created: int
    model: str
    service_tier: Tier
    system_fingerprint: str


class TopLogprob(TypedDict):
    """A token that could have been."""

    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprob(TypedDict):
    """A token and those that could have been in its place."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """The tokens of the text."""

    content: list[ChatTokenLogprob]
    refusal: None


class AnswerFunction(TypedDict):
    """A function and its arguments: a JSON object as text."""

    name: str
    arguments: str


class AnswerCall(TypedDict):
    """A call of a tool, for the client to make."""

    id: str
    type: Literal["function"]
    function: AnswerFunction


class AssistantMessage(TypedDict):
    """The answer's turn; beside calls there need be no content, and after a thought that a limit has cut."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[AnswerCall]]


class ChatChoice(TypedDict):
    """One of `n` answers."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReasonText


class ChatCompletion(AnswerFields):
    """A whole chat answer."""

    choices: list[ChatChoice]
    usage: CompletionUsage


class FunctionDelta(TypedDict):
    """The function's name at first, then more of its arguments."""

    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    """Of the call number `index`, which has its id and type at first."""

    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    """What has come: `role` at the beginning, nothing at the end. Content is null at the beginning of an answer that
    may call or think."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallDelta]]


class ChatChunkChoice(TypedDict):
    """Of one of `n` answers; `finish_reason` is in the last."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReasonText | None


class ChatCompletionChunk(AnswerFields):
    """A part of a chat answer. With `stream_options.include_usage`, `usage` is in every chunk, null but in the last."""

    choices: list[ChatChunkChoice]
    usage: NotRequired[CompletionUsage | None]


class TextLogprobs(TypedDict):
    """The tokens of the text, and where each stands in it. A prompt's first token follows nothing: null."""

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


class TextCompletion(AnswerFields):
    """Whole texts."""

    choices: list[TextChoice]
    usage: CompletionUsage


class TextChunkChoice(TypedDict):
    """A part of one text; `finish_reason` is in the last."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReasonText | None


class TextCompletionChunk(AnswerFields):
    """A part of the texts. With `stream_options.include_usage`, `usage` is in every chunk, null but in the last."""

    choices: list[TextChunkChoice]
    usage: NotRequired[CompletionUsage | None]

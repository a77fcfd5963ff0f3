"""What OpenAI's answers of text look like: the types that they are made as, and that the OpenAPI shows."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypedDict

from msgspec import Meta

from moiety_wire.messages import FinishReason

Count = Annotated[int, Meta(extra_json_schema={"minimum": 0})]
FinishReasonText = Annotated[str, Meta(extra_json_schema={"enum": [reason.value for reason in FinishReason]})]
Tier = Annotated[str, Meta(extra_json_schema={"enum": ["default", "flex", "priority"]})]


class PromptTokensDetails(TypedDict):
    """Prompt tokens that the prefix cache held."""

    cached_tokens: Count


class CompletionUsage(TypedDict):
    """What is billed."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


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


class AssistantMessage(TypedDict):
    """The answer's turn."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One of `n` answers."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonText


class ChatCompletion(AnswerFields):
    """A whole chat answer."""

    choices: list[ChatChoice]
    usage: CompletionUsage


class ChatDelta(TypedDict):
    """What has come: `role` at the beginning, nothing at the end."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """Of one of `n` answers; `finish_reason` is in the last."""

    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonText | None


class ChatCompletionChunk(AnswerFields):
    """A part of a chat answer. With `stream_options.include_usage`, `usage` is in every chunk, null but in the last."""

    choices: list[ChatChunkChoice]
    usage: NotRequired[CompletionUsage | None]


class TextLogprobs(TypedDict):
    """The tokens of the text, and where each stands in it."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
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

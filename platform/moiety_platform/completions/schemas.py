"""The bodies of `/v1/chat/completions` and `/v1/completions`: OpenAI's fields, strictly typed, and what they ask for.

Unknown fields are ignored, as OpenAI's clients expect; what is known and not supported yet is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, PydanticKnownError

from moiety_platform.completions.generation import Conversation, Generation, Prompt
from moiety_platform.completions.limits import DEFAULT_SHAPE, ShapeLimits
from moiety_wire.messages import Sampling

ROLES = ("system", "developer", "user", "assistant", "tool")
INT32_MAX = 2**31 - 1
COMPLETION_DEFAULT_MAX_TOKENS = 16
MAX_MESSAGES = 16_384  # what the settings allow at most, as the next two
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_PARTS = 2048  # of one message
MAX_PROMPTS = 2048
MAX_TOKEN_IDS = 2**20  # of one prompt or text
MAX_BIASES = 4096

_Penalty = Annotated[FiniteFloat, Field(ge=-2, le=2)]
_TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
_StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]


# Lists end at their first bad entry: complaints about every entry of a large body would take seconds to collect.
TokenIds = Annotated[list[_TokenId], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]


def _shape(info: ValidationInfo) -> ShapeLimits:
    return info.context if isinstance(info.context, ShapeLimits) else DEFAULT_SHAPE


def _refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{reason}", {"reason": message})


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @field_validator("continuous_usage_stats")
    @classmethod
    def _usage_comes_once(cls, value: bool | None) -> bool | None:
        if value:
            raise _refuse("usage in every chunk is not supported; leave it out, and set 'include_usage' for the totals")
        return value


class ResponseFormat(_Body):
    type: str

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        if value != "text":
            raise _refuse(f"{value!r} is not supported yet; use 'text'")
        return value


class GenerationBody(_Body):
    """What both endpoints share. null means the default, as everywhere in OpenAI's API."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None  # 0: only the best token
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None  # 0 and -1: off
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0, le=10)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[FiniteFloat, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _StopString | Annotated[list[_StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(fail_fast=True, max_length=128)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    response_format: ResponseFormat | None = None

    @field_validator("n")
    @classmethod
    def _few_choices(cls, value: int | None, info: ValidationInfo) -> int | None:
        most = _shape(info).max_choices
        if value is not None and value > most:
            raise _refuse(f"it is {value}; it may be {most} at most")
        return value

    @field_validator("stop")
    @classmethod
    def _short_stops(cls, value: str | list[str] | None, info: ValidationInfo) -> str | list[str] | None:
        shape = _shape(info)
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > shape.max_stop_strings or any(len(stop) > shape.max_stop_chars for stop in stops):
            raise _refuse("too many or too long")  # told by the field's forms
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise _refuse(f"it has {len(value):,} entries; it may have {MAX_BIASES:,}")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise _refuse(f"its keys must be token ids, such as '42'; {key[:32]!r} is none")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _refuse("'stream_options' is allowed only when 'stream' is true")
        limit = self.output_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise _refuse(f"'min_tokens' ({self.min_tokens}) must not be more than the most tokens asked for ({limit})")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def generation(self) -> Generation:
        raise NotImplementedError

    def _generation(self, prompts: tuple[Prompt, ...], num_logprobs: int | None) -> Generation:
        stop = self.stop or ()
        return Generation(
            model=self.model,
            prompts=prompts,
            num_choices=self.n or 1,
            sampling=Sampling(
                temperature=_default(self.temperature, 1.0),
                top_p=_default(self.top_p, 1.0),
                top_k=max(0, self.top_k or 0),
                min_p=self.min_p or 0.0,
                repetition_penalty=_default(self.repetition_penalty, 1.0),
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                logit_bias={int(key): value for key, value in (self.logit_bias or {}).items()},
                seed=self.seed,
                num_logprobs=num_logprobs,
            ),
            max_tokens=self.output_limit,
            min_tokens=self.min_tokens or 0,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            service_tier=self.service_tier,
        )


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One turn. Several text parts are joined by line breaks; null, which only an assistant may send, is no text."""

    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None

    @field_validator("role")
    @classmethod
    def _known_role(cls, value: str) -> str:
        if value not in ROLES:
            raise _refuse(f"{value[:64]!r} is not a role; use one of {', '.join(ROLES)}")
        return value

    @field_validator("content")
    @classmethod
    def _null_is_the_assistants(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role", "assistant") != "assistant":
            raise _refuse("null is for the assistant only")
        return value

    @field_validator("tool_calls")
    @classmethod
    def _no_calls(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise _refuse("tool calls are not supported yet; leave them out")
        return value

    def for_template(self) -> dict[str, Any]:
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _few_messages(value: list[ChatMessage], info: ValidationInfo) -> list[ChatMessage]:
    most = _shape(info).max_messages
    if len(value) > most:
        raise PydanticKnownError("too_long", {"field_type": "List", "max_length": most, "actual_length": len(value)})
    return value


Messages = Annotated[
    list[ChatMessage],
    Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
    AfterValidator(_few_messages),
]


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None

    @field_validator("tools", "functions")
    @classmethod
    def _no_tools(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise _refuse("tools are not supported yet; leave the field out")
        return value

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _refuse("'top_logprobs' is allowed only when 'logprobs' is true")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def generation(self) -> Generation:
        conversation = Conversation(tuple(message.for_template() for message in self.messages))
        return self._generation((conversation,), (self.top_logprobs or 0) if self.logprobs else None)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`. A prompt is raw: control tokens of the model that are written out in its text are encoded
    as such, since whoever sends it writes the whole of what the model reads. Chats are guarded against that."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise _refuse("completing in front of a suffix is not supported; leave the field out")
        return value

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _refuse("'best_of' is not supported beyond 'n'; leave it out")
        if self.echo and self.logprobs is not None:
            raise _refuse("'echo' together with 'logprobs' is not supported; leave one of them out")
        if not self.prompt:
            raise _refuse("'prompt' is empty; send at least one token of text")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else COMPLETION_DEFAULT_MAX_TOKENS

    def generation(self) -> Generation:
        return self._generation(_prompts(self.prompt), self.logprobs)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(part if isinstance(part, str) else tuple(part) for part in prompt)


def _default(value: float | None, default: float) -> float:
    return default if value is None else value

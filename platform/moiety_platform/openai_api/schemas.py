"""The bodies of `/v1/chat/completions` and `/v1/completions`: OpenAI's fields, strictly typed.

Unknown fields are ignored, as OpenAI's clients expect. Known fields that are not supported yet are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import ConfigDict, Field, FiniteFloat, ValidationInfo, field_validator, model_validator

from moiety_platform.errors import UNSUPPORTED_RESPONSE_FORMAT
from moiety_platform.inference.body_fields import (
    INT32_MAX,
    KEEP_S,
    GeneratingBody,
    MetadataPairs,
    ModelName,
    RawPrompts,
    Retention,
    StopString,
    StopStrings,
    StrictBody,
    TokenId,
    as_prompts,
    at_most,
    forms_of_prompts,
    only_with,
    refuse,
    shows,
)
from moiety_platform.inference.generation import Conversation, Generation, Prompt
from moiety_platform.inference.tool_fields import TemplateVariables
from moiety_platform.openai_api.chat_messages import ChatMessage, Messages
from moiety_platform.openai_api.response_formats import FORMS as FORMS_OF_FORMS
from moiety_platform.openai_api.response_formats import StructuredOutputBody, require_one_form
from moiety_platform.openai_api.tools import NEEDS_TOOLS, ChatChoice, ChatTools, check_choice, offer_of
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import Sampling

COMPLETION_DEFAULT_MAX_TOKENS = 16
MAX_BIASES = 4096
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it and must stay within float32

FORMS = MappingProxyType(
    {
        **FORMS_OF_FORMS,
        "content": 'must be a string or a list of parts {{"type": "text", "text": "…"}}; other parts are not '
        "supported, and null is for the assistant only",
        "prompt": forms_of_prompts("prompts"),
        "stop": "must be a string or a list of at most {max_stop_strings} strings, none of them empty or longer than "
        "{max_stop_chars:,} characters",
    }
)

_Penalty = Annotated[FiniteFloat, Field(ge=-2, le=2)]
_LogitBias = Annotated[
    dict[str, Annotated[FiniteFloat, Field(ge=-100, le=100)]],
    shows(maxProperties=MAX_BIASES, propertyNames={"pattern": "^[0-9]{1,9}$"}),
]
STREAMED_OPTIONS = only_with("stream_options", "stream")


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool, shows(const=False)] | None = None

    @field_validator("continuous_usage_stats")
    @classmethod
    def _usage_comes_once(cls, value: bool | None) -> bool | None:
        if value:
            raise refuse("usage in every chunk is not supported; leave it out, and set 'include_usage' for the totals")
        return value


class GenerationBody(StructuredOutputBody, GeneratingBody):
    """Fields common to both endpoints. null means the default, as everywhere in OpenAI's API."""

    model_config = ConfigDict(json_schema_extra={"allOf": [STREAMED_OPTIONS]})

    forms: ClassVar[Mapping[str, str]] = FORMS

    model: ModelName
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None  # 0: only the most likely token
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None  # 0 and -1: off
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=MIN_REPETITION_PENALTY, le=10)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=128)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=INT32_MAX), at_most(lambda shape: shape.max_choices)] | None = None
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    prompt_cache_retention: Retention | None = None
    user: str | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise refuse(f"it has {len(value):,} entries; it may have {MAX_BIASES:,}")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise refuse(f"its keys must be token ids, such as '42'; {key[:32]!r} is none")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("'stream_options' is allowed only when 'stream' is true")
        if self.ignore_eos and self.grammar() is not None:
            message = "'ignore_eos' cannot go with a form, which says where the answer ends; leave one of them out"
            raise refuse(message, UNSUPPORTED_RESPONSE_FORMAT)
        limit = self.output_limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise refuse(f"'min_tokens' ({self.min_tokens}) must not be more than the most tokens asked for ({limit})")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _generation(
        self, prompts: tuple[Prompt, ...], num_logprobs: int | None, grammar: GrammarSpec | None
    ) -> Generation:
        stop = self.stop or ()
        return Generation(
            model=self.model,
            prompts=prompts,
            num_choices=self.n or 1,
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=max(0, self.top_k or 0),
                min_p=self.min_p or 0.0,
                repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                logit_bias={int(key): value for key, value in self.logit_bias.items()} if self.logit_bias else {},
                seed=self.seed,
                num_logprobs=num_logprobs,
            ),
            max_tokens=self.output_limit,
            min_tokens=self.min_tokens or 0,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            grammar=grammar,
            service_tier=self.service_tier,
            keep_s=KEEP_S[self.prompt_cache_retention or "in_memory"],
        )


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={"allOf": [STREAMED_OPTIONS, only_with("top_logprobs", "logprobs"), NEEDS_TOOLS]}
    )

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: ChatTools | None = None
    tool_choice: ChatChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None  # none: no reasoning
    chat_template_kwargs: TemplateVariables | None = None
    metadata: MetadataPairs | None = None
    safety_identifier: str | None = None
    functions: Annotated[list[Any], shows(maxItems=0)] | None = None
    function_call: Annotated[Any, shows(enum=[None])] = None

    @field_validator("tool_choice")
    @classmethod
    def _choice_among_tools(cls, value: ChatChoice | None, info: ValidationInfo) -> ChatChoice | None:
        check_choice(value, info.data.get("tools"))
        return value

    @field_validator("functions", "function_call")
    @classmethod
    def _no_functions(cls, value: Any) -> Any:
        if value not in (None, []):
            raise refuse("this is OpenAI's older form; send 'tools' and 'tool_choice'")
        return value

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("'top_logprobs' is allowed only when 'logprobs' is true")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def generation(self) -> Generation:
        offer, grammar = None, self.grammar()
        if self.tools:
            offer = offer_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)
            require_one_form(grammar, offer, "response_format")
        messages = tuple(map(ChatMessage.for_template, self.messages))
        conversation = Conversation(
            messages,
            tools=offer,
            effort=self.reasoning_effort,
            template_options=self.chat_template_kwargs or {},
        )
        return self._generation((conversation,), (self.top_logprobs or 0) if self.logprobs else None, grammar)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`.

    The prompt is raw text. Control tokens that are written out in it are encoded as control tokens, since the caller
    writes the complete model input. Chat endpoints prevent this.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                STREAMED_OPTIONS,
                {
                    "if": {
                        "required": ["echo", "stream"],
                        "properties": {"echo": {"const": True}, "stream": {"const": True}},
                    },
                    "then": {"properties": {"logprobs": {"type": "null"}}},
                },
            ]
        }
    )

    prompt: RawPrompts
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: Annotated[str, shows(maxLength=0)] | None = None
    best_of: int | None = None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise refuse("completing in front of a suffix is not supported; leave the field out")
        return value

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refuse("'best_of' is not supported beyond 'n'; leave it out")
        if self.echo and self.logprobs is not None and self.stream:
            raise refuse("'echo' together with 'logprobs' is not supported in a stream; leave one of them out")
        if not self.prompt:
            raise refuse("'prompt' is empty; send at least one token of text")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else COMPLETION_DEFAULT_MAX_TOKENS

    def generation(self) -> Generation:
        generation = msgspec.structs.replace(
            self._generation(as_prompts(self.prompt), self.logprobs, self.grammar()),
            max_tokens=self.max_tokens,
            default_max_tokens=COMPLETION_DEFAULT_MAX_TOKENS,
            echo=bool(self.echo),
        )
        if not self.echo or self.logprobs is None:
            return generation
        scoring = msgspec.structs.replace(generation.sampling, num_prompt_logprobs=self.logprobs)
        return msgspec.structs.replace(generation, sampling=scoring)

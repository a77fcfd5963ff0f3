"""The bodies of `/v1/chat/completions` and `/v1/completions`: OpenAI's fields, strictly typed.

Unknown fields are ignored, as OpenAI's clients expect. A known field is served unless it has a mark of `field_support`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import ConfigDict, Field, FiniteFloat, StringConstraints, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

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
    TokenId,
    as_prompts,
    at_most,
    forms_of_prompts,
    only_with,
    refuse,
    shows,
)
from moiety_platform.inference.field_support import ignored, mapped, refused
from moiety_platform.inference.generation import Conversation, Generation, Prompt, ReasoningFields, unset_fields
from moiety_platform.inference.reasoning_fields import Effort
from moiety_platform.inference.tool_fields import TemplateVariables
from moiety_platform.openai_api.chat_messages import Messages, messages_of
from moiety_platform.openai_api.provider_reasoning import AskedReasoning, ProviderReasoningFields
from moiety_platform.openai_api.request_options import CACHE_TTL_S, PromptCacheOptions, StreamOptions
from moiety_platform.openai_api.response_formats import FORMS as FORMS_OF_FORMS
from moiety_platform.openai_api.response_formats import StructuredOutputBody, format_beside
from moiety_platform.openai_api.responses_form import chat_of_responses_form
from moiety_platform.openai_api.tool_message import MessageForm
from moiety_platform.openai_api.tools import (
    NEEDS_TOOLS,
    ChatChoice,
    ChatFunctions,
    ChatTools,
    CustomTool,
    FunctionChoice,
    check_choice,
    known_tools,
    offer_of,
    offer_of_functions,
    skipped_tools,
)
from moiety_platform.openai_api.vllm_fields import VllmCompletionFields, VllmFields
from moiety_text.tools.offer import ToolOffer
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import Sampling

MAX_NAMED_KEYS = 8  # in an error message
COMPLETION_DEFAULT_MAX_TOKENS = 16
MAX_BIASES = 4096
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it and must stay within float32

FORMS = MappingProxyType(
    {
        **FORMS_OF_FORMS,
        "content": 'must be a string or a list of parts, such as {{"type": "text", "text": "…"}}',
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

_EndUser = Annotated[str, StringConstraints(max_length=512)]
_REASONING_FIELDS = ReasoningFields()
_TIERS: Mapping[str, str] = MappingProxyType({"fast": "priority", "scale": "auto"})
_WITH_LOGPROBS: dict[str, Any] = {
    "if": {"required": ["top_logprobs"], "properties": {"top_logprobs": {"type": "integer", "minimum": 1}}},
    "then": {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}},
}


class GenerationBody(VllmFields, StructuredOutputBody, GeneratingBody):
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
    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority", "fast", "scale", "spot"] | None,
        mapped("`fast` means `priority`, and `scale` means `auto`. `spot` means the spot class."),
    ] = None
    prompt_cache_retention: Retention | None = None
    user: _EndUser | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_biases(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise refuse(f"it has {len(value):,} entries; it may have {MAX_BIASES:,}")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        wrong = [key for key in value or () if not (key.isascii() and key.isdigit() and len(key) < 10)]
        if wrong:
            named = ", ".join(repr(key[:32]) for key in wrong[:MAX_NAMED_KEYS])
            raise refuse(f"its keys must be token ids, such as '42'; {len(wrong)} are none: {named}")
        return value

    def problems(self) -> Iterator[PydanticCustomError]:
        if self.stream_options is not None and not self.stream:
            yield refuse("'stream_options' is allowed only when 'stream' is true")
        if self.prompt_logprobs is not None and self.stream:
            yield refuse("'prompt_logprobs' is not available in a stream; leave one of them out")
        if self.truncate_prompt_tokens == 0:
            yield refuse("'truncate_prompt_tokens' is 0, which leaves no prompt; send a larger number")
        try:
            has_form = self.grammar() is not None
        except PydanticCustomError as problem:
            yield problem
        else:
            if has_form and self.ignore_eos:
                message = (
                    "'ignore_eos' cannot be combined with a response format, which defines the end of the "
                    "answer; leave one of the two out"
                )
                yield refuse(message, UNSUPPORTED_RESPONSE_FORMAT)
        if self.min_tokens and (limit := self.output_limit) is not None and self.min_tokens > limit:
            yield refuse(
                f"'min_tokens' ({self.min_tokens}) must not exceed the largest number of output tokens ({limit})"
            )

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def output_limit_field(self) -> str:
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """True if every chunk of a stream has the usage so far, if the last one has usage."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def keep_s(self) -> float:
        """Prefix-cache retention of the conversation."""
        return KEEP_S[self.prompt_cache_retention or "in_memory"]

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
                logit_bias={int(key): value for key, value in self.logit_bias.items()} if self.logit_bias else None,
                seed=self.seed,
                num_logprobs=num_logprobs,
                num_prompt_logprobs=self.prompt_logprobs,
            ),
            unset_sampling=unset_fields(self),
            max_tokens=self.output_limit,
            max_tokens_field=self.output_limit_field,
            min_tokens=self.min_tokens or 0,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            grammar=grammar,
            service_tier=_TIERS.get(self.service_tier or "auto", self.service_tier),
            keep_s=self.keep_s,
            shows_special_tokens=self.skip_special_tokens is False,
            allowed_ids=tuple(dict.fromkeys(self.allowed_token_ids or ())),
            bad_words=tuple(dict.fromkeys(self.bad_words or ())),
            includes_stop=bool(self.include_stop_str_in_output),
            truncate_tokens=self.truncate_prompt_tokens,
            truncates_left=self.truncation_side != "right",
            cache_salt=self.cache_salt or "",
        )


class ChatBody(ProviderReasoningFields, GenerationBody):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra={"allOf": [STREAMED_OPTIONS, _WITH_LOGPROBS, NEEDS_TOOLS]})

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[
        ChatTools | None,
        mapped(
            "Tools of unknown types are skipped, unless `tool_choice` requires one. A custom tool's grammar that "
            "cannot be enforced is refused."
        ),
    ] = None
    tool_choice: ChatChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[ChatFunctions | None, mapped("Older form of OpenAI's `tools`.")] = None
    function_call: Annotated[FunctionChoice | None, mapped("Older form of OpenAI's `tool_choice`.")] = None
    reasoning_effort: Effort = None
    chat_template_kwargs: TemplateVariables | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_key: Annotated[
        _EndUser | None, ignored("Prefixes are cached without a key, separately for each tenant.")
    ] = None
    metadata: MetadataPairs | None = None
    safety_identifier: _EndUser | None = None
    store: Annotated[bool | None, ignored("Chats are not stored. Use `/v1/responses` to store responses.")] = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None,
        ignored("Models have no such option. Put the request into the instructions."),
    ] = None
    prediction: Annotated[
        dict[str, Any] | None, ignored("The field can make an answer faster, but does not change it.")
    ] = None
    web_search_options: Annotated[
        dict[str, Any] | None, ignored("The server has no web search. Offer your own search as a tool.")
    ] = None
    modalities: Annotated[
        Any, refused("answers are text only; send ['text'] or leave the field out", [["text"], []])
    ] = None
    audio: Annotated[Any, refused("answers are text only; leave the field out", [])] = None
    moderation: Annotated[
        Any, refused("prompts and answers are not moderated here; leave the field out, and moderate them yourself", [])
    ] = None

    @classmethod
    def translated(cls, data: bytes) -> bytes | None:
        return chat_of_responses_form(data)

    @field_validator("tool_choice")
    @classmethod
    def _choice_among_tools(cls, value: ChatChoice | None, info: ValidationInfo) -> ChatChoice | None:
        if "tools" in info.data:
            check_choice(value, [tool.name for tool in known_tools(info.data["tools"])])
        return value

    @field_validator("function_call")
    @classmethod
    def _choice_among_functions(cls, value: FunctionChoice | None, info: ValidationInfo) -> FunctionChoice | None:
        if "functions" in info.data:
            check_choice(value, [function.name for function in info.data["functions"] or ()], "functions")
        return value

    def problems(self) -> Iterator[PydanticCustomError]:
        yield from super().problems()
        if self.top_logprobs and not self.logprobs:
            yield refuse("'top_logprobs' is allowed only when 'logprobs' is true")
        if self.functions and self.tools:
            yield refuse("'functions' is the older form of 'tools'; send only one of the two")
        if self.continue_final_message:
            yield from self._problems_of_continuation()
        elif self.add_generation_prompt is False:
            yield refuse("'add_generation_prompt' may be false only when 'continue_final_message' is true")

    def _problems_of_continuation(self) -> Iterator[PydanticCustomError]:
        last = self.messages[-1]
        if self.add_generation_prompt:
            yield refuse("'add_generation_prompt' and 'continue_final_message' are both true; leave one of them out")
        if last.role != "assistant" or not last.text or last.tool_calls or last.function_call:
            yield refuse("'continue_final_message' needs a last message of the assistant with text and without calls")
        offer = self.offer()
        if offer is not None and offer.must_call:
            yield refuse("'continue_final_message' cannot be combined with a tool that must be called; choose 'auto'")

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def output_limit_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def keep_s(self) -> float:
        options = self.prompt_cache_options
        ttl_s = 0.0 if options is None or options.ttl is None else CACHE_TTL_S[options.ttl]
        return max(ttl_s, KEEP_S[self.prompt_cache_retention or "in_memory"])

    def skipped_entries(self) -> Iterator[str]:
        if self.tools:
            yield from skipped_tools(self.tools)
        for message in self.messages:
            if isinstance(message.content, list) and message.has_detail:
                yield "messages.content.image_url.detail"
                break

    @property
    def thought_budget(self) -> int | None:
        """Most tokens of the reasoning; None without a limit."""
        budget, other = self.thinking_token_budget, self.max_thinking_tokens
        if budget is None or other is None:
            return other if budget is None else budget
        return min(budget, other)

    def offer(self) -> ToolOffer | None:
        """Return the tools that the model may call, or None."""
        if self.functions:
            return offer_of_functions(self.functions, self.function_call, parallel=False)
        if not self.tools:
            return None
        return offer_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)

    def message_form(self) -> MessageForm:
        """Return the form of the answer's messages."""
        custom_names: Collection[str] = ()
        if self.tools:
            custom_names = {tool.name for tool in known_tools(self.tools) if isinstance(tool, CustomTool)}
        shows_reasoning = self.include_reasoning is not False and not (self.reasoning and self.excludes_reasoning)
        return MessageForm(custom_names, bool(self.functions), shows_reasoning)

    def generation(self) -> Generation:
        offer = self.offer()
        grammar = format_beside(offer, self.grammar())
        options = self.chat_template_kwargs or {}
        if self.documents is not None:
            options = {"documents": self.documents, **options}
        asked = AskedReasoning(None, self.reasoning_effort, self.thought_budget, _REASONING_FIELDS)
        by_other_names = (self.thinking, self.enable_thinking, self.thinking_budget, self.reasoning)
        if by_other_names != (None, None, None, None) or self.max_thinking_tokens is not None:
            asked = self.asked_reasoning(asked.effort, asked.budget)
        messages, prefill = messages_of(self.messages), ""
        if self.continue_final_message:
            messages, prefill = messages[:-1], messages[-1]["content"]
        conversation = Conversation(
            messages,
            prefill,
            offer,
            thinks=asked.thinks,
            effort=asked.effort,
            template_options=options,
            thought_budget=asked.budget,
            reasoning_fields=asked.fields,
        )
        return self._generation((conversation,), (self.top_logprobs or 0) if self.logprobs else None, grammar)


class CompletionBody(VllmCompletionFields, GenerationBody):
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
    max_tokens: Annotated[
        Annotated[int, Field(ge=0, le=INT32_MAX)] | None,
        mapped("With 0 one token is generated and billed, and the answer does not contain it."),
    ] = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: Annotated[str | None, refused("completion before a suffix is not supported; leave the field out", [""])] = (
        None
    )
    best_of: Annotated[int | None, refused("Only the value of `n` is accepted.")] = None

    def problems(self) -> Iterator[PydanticCustomError]:
        yield from super().problems()
        if self.best_of is not None and self.best_of != (self.n or 1):
            yield refuse("'best_of' is not supported beyond 'n'; leave it out")
        if self.echo and self.logprobs is not None and self.stream:
            yield refuse("'echo' together with 'logprobs' is not supported in a stream; leave one of them out")
        if not self.prompt:
            yield refuse("'prompt' is empty; send at least one token of text")
        if self.echo and self.truncate_prompt_tokens is not None:
            yield refuse("'echo' cannot be combined with 'truncate_prompt_tokens'; leave one of them out")

    @property
    def output_limit(self) -> int | None:
        return COMPLETION_DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    def generation(self) -> Generation:
        generation = msgspec.structs.replace(
            self._generation(as_prompts(self.prompt), self.logprobs, self.grammar()),
            max_tokens=None if self.max_tokens is None else max(1, self.max_tokens),
            default_max_tokens=COMPLETION_DEFAULT_MAX_TOKENS,
            echo=bool(self.echo),
            adds_special_tokens=self.add_special_tokens is not False,
        )
        if not self.echo or self.logprobs is None:
            return generation
        num_scored = max(self.logprobs, self.prompt_logprobs or 0)
        scoring = msgspec.structs.replace(generation.sampling, num_prompt_logprobs=num_scored)
        return msgspec.structs.replace(generation, sampling=scoring)

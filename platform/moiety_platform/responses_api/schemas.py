"""The body of `/v1/responses`: OpenAI's fields, strictly typed.

Unknown fields are ignored. Known ones are marked where they are not served as OpenAI serves them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from moiety_platform.inference.body_fields import (
    INT32_MAX,
    KEEP_S,
    GeneratingBody,
    MetadataPairs,
    Retention,
    StrictBody,
    refuse,
    shows,
)
from moiety_platform.inference.field_support import ignored, mapped, refused
from moiety_platform.inference.generation import Conversation, Generation, ReasoningFields, unset_fields
from moiety_platform.inference.reasoning_fields import Effort
from moiety_platform.openai_api.response_formats import TextFormat, format_beside
from moiety_platform.openai_api.schemas import STREAMED_OPTIONS
from moiety_platform.responses_api.compaction import TIERS, compaction_of
from moiety_platform.responses_api.input import InputItems
from moiety_platform.responses_api.item_bodies import ToolItemsBody
from moiety_platform.responses_api.tool_choice import AUTO
from moiety_wire.messages import Sampling

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
NOTHING_TO_INCLUDE = (  # fields of items that no answer here has
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)

_REASONING_FIELDS = ReasoningFields(effort="reasoning.effort")

_Name = Annotated[str, StringConstraints(max_length=512)]
_Part = Annotated[str, shows(enum=[LOGPROBS, ENCRYPTED, *NOTHING_TO_INCLUDE])]
_Refused = Annotated[Any, shows(enum=[None, [], {}])]
_RULES: dict[str, Any] = {
    "allOf": [
        STREAMED_OPTIONS,
        {
            "if": {"required": ["background"], "properties": {"background": {"const": True}}},
            "then": {"properties": {"store": {"not": {"const": False}}}},
        },
        {
            "if": {"required": ["top_logprobs"], "properties": {"top_logprobs": {"type": "integer", "minimum": 1}}},
            "then": {
                "required": ["include"],
                "properties": {"include": {"type": "array", "contains": {"const": LOGPROBS}}},
            },
        },
    ]
}
_REFUSED = {
    "prompt": "prompts are not stored here; send the text of the prompt as 'instructions' or 'input'",
    "moderation": "prompts and answers are not moderated here; leave the field out, and moderate them yourself",
}


class ResponseStreamOptions(StrictBody):
    include_obfuscation: Annotated[bool | None, ignored("Events are not padded.")] = None


class TextOptions(StrictBody):
    format: TextFormat | None = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None,
        ignored("Models have no such option. Put the request into the instructions."),
    ] = None


class ReasoningOption(StrictBody):
    """Reasoning effort. "none" turns reasoning off."""

    effort: Effort = None
    summary: Annotated[
        Literal["auto", "concise", "detailed"] | None,
        ignored("The answer has the reasoning itself, without a summary."),
    ] = None
    generate_summary: Annotated[
        Literal["auto", "concise", "detailed"] | None,
        ignored("The answer has the reasoning itself, without a summary."),
    ] = None
    context: Annotated[
        Literal["auto", "current_turn", "all_turns"] | None,
        ignored("The chat template decides which reasoning it renders."),
    ] = None
    mode: Annotated[str | None, ignored("Models have one mode of reasoning.")] = None


class ContextEntry(StrictBody):
    type: str
    compact_threshold: Annotated[int | None, ignored("The conversation is shortened only if it does not fit.")] = None


class ResponsesBody(GeneratingBody, ToolItemsBody):
    """`POST /v1/responses`. null means the default."""

    model_config = ConfigDict(json_schema_extra=_RULES)

    input: InputItems
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    max_tool_calls: Annotated[
        int | None, ignored("The field limits calls of hosted tools, which this server does not have.")
    ] = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None  # 0: only the most likely token
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[
        Annotated[list[_Part], Field(fail_fast=True, max_length=64)] | None,
        mapped(
            "Log probabilities and encrypted reasoning are served. Other values refer to items that no answer of "
            "this server has."
        ),
    ] = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority", "fast", "scale", "ultrafast", "spot"] | None,
        mapped("`fast` and `ultrafast` mean `priority`, and `scale` means `auto`. `spot` means the spot class."),
    ] = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None  # implies `store`
    background_options: Annotated[dict[str, Any] | None, ignored("Background responses begin at once.")] = None
    metadata: MetadataPairs | None = None
    user: _Name | None = None
    safety_identifier: _Name | None = None
    prompt_cache_key: Annotated[
        _Name | None, ignored("Prefixes are cached without a key, separately for each tenant.")
    ] = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, ignored("Every prefix is cached, with and without breakpoints.")
    ] = None
    reasoning: ReasoningOption | None = None
    context_management: Annotated[
        Annotated[list[ContextEntry], Field(fail_fast=True, max_length=16)] | None,
        mapped("A conversation that does not fit the context is shortened, as with `truncation` `auto`."),
    ] = None
    client_metadata: Annotated[dict[str, Any] | None, ignored("The field is for OpenAI's own statistics.")] = None
    access_programs: Annotated[dict[str, Any] | None, ignored("There are no such programs here.")] = None
    image: Annotated[dict[str, Any] | None, ignored("Images are not compressed.")] = None
    multi_agent: Annotated[
        dict[str, Any] | None, ignored("The server runs no subagents. The model answers by itself.")
    ] = None
    prompt: Annotated[_Refused, refused(_REFUSED["prompt"])] = None
    moderation: Annotated[_Refused, refused(_REFUSED["moderation"])] = None

    @field_validator(*_REFUSED)
    @classmethod
    def _not_served(cls, value: Any, info: ValidationInfo) -> Any:
        if value not in (None, [], {}):
            raise refuse(_REFUSED[str(info.field_name)])
        return value

    @field_validator("include")
    @classmethod
    def _known_parts(cls, value: list[str] | None) -> list[str] | None:
        known = (LOGPROBS, ENCRYPTED, *NOTHING_TO_INCLUDE)
        for name in value or ():
            if name not in known:
                raise refuse(f"{name[:64]!r} is unknown; those with an effect are {LOGPROBS!r} and {ENCRYPTED!r}")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("'stream_options' is allowed only when 'stream' is true")
        if self.top_logprobs and not self.wants_logprobs:
            raise refuse(f"'top_logprobs' is allowed only when 'include' has {LOGPROBS!r}")
        if self.background and self.store is False:
            raise refuse("'background' needs 'store', since the response is read from the store; leave 'store' out")
        return self

    @property
    def is_stored(self) -> bool:
        return bool(self.store or self.background)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def wants_encrypted_reasoning(self) -> bool:
        return ENCRYPTED in (self.include or ())

    def generation(self) -> Generation:
        """Return the generation to run. Raises BadRequest if calls and results do not match."""
        messages = self.messages()
        if self.wants_compaction:
            return compaction_of(self.model, messages, self.service_tier)
        offer = (self.tool_choice or AUTO).offer(self.offered, parallel=self.parallel_tool_calls is not False)
        grammar = None if self.text is None or self.text.format is None else self.text.format.grammar()
        return Generation(
            model=self.model,
            prompts=(
                Conversation(
                    messages,
                    tools=offer,
                    effort=None if self.reasoning is None else self.reasoning.effort,
                    reasoning_fields=_REASONING_FIELDS,
                ),
            ),
            num_choices=1,
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                num_logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            ),
            unset_sampling=unset_fields(self),
            max_tokens=self.max_output_tokens,
            max_tokens_field="max_output_tokens",
            service_tier=TIERS.get(self.service_tier or "", self.service_tier),
            keep_s=KEEP_S[self.prompt_cache_retention or "in_memory"],
            grammar=format_beside(offer, grammar),
            truncates=self.truncation == "auto" or bool(self.context_management),
        )

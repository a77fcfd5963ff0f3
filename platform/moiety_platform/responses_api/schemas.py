"""The body of `/v1/responses`: OpenAI's fields, strictly typed.

Unknown fields are ignored, and so are hints that cannot change an answer here, such as `prompt_cache_key`: prefixes are
cached without being marked, and always separately for each tenant. Known fields that would change the answer and are
not supported are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    FiniteFloat,
    PrivateAttr,
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
    ModelName,
    Retention,
    StrictBody,
    refuse,
    shows,
)
from moiety_platform.inference.generation import Conversation, Generation, ReasoningFields
from moiety_platform.inference.reasoning_fields import Effort
from moiety_platform.openai_api.response_formats import TextFormat, require_one_form
from moiety_platform.openai_api.schemas import STREAMED_OPTIONS
from moiety_platform.openai_api.tools import NEEDS_TOOLS, offer_of_functions
from moiety_platform.responses_api.input import InputItems
from moiety_platform.responses_api.items import Continued, Item, check_results, messages_of
from moiety_platform.responses_api.tools import ResponseChoice, ResponseTools, check_choice
from moiety_wire.messages import Sampling

LOGPROBS = "message.output_text.logprobs"
NOTHING_TO_INCLUDE = (  # fields of items that no answer here has
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)

_UNSUPPORTED = ("conversation", "prompt", "context_management", "moderation")

_REASONING_FIELDS = ReasoningFields(effort="reasoning.effort")
_Name = Annotated[str, StringConstraints(max_length=512)]
_Part = Annotated[str, shows(enum=[LOGPROBS, *NOTHING_TO_INCLUDE])]
_Unsupported = Annotated[Any, shows(enum=[None, [], {}])]
_RULES: dict[str, Any] = {
    "allOf": [
        STREAMED_OPTIONS,
        NEEDS_TOOLS,
        {
            "if": {"required": ["top_logprobs"], "properties": {"top_logprobs": {"type": "integer", "minimum": 1}}},
            "then": {
                "required": ["include"],
                "properties": {"include": {"type": "array", "contains": {"const": LOGPROBS}}},
            },
        },
    ]
}


class ResponseStreamOptions(StrictBody):
    include_obfuscation: Annotated[bool, shows(const=False)] | None = None

    @field_validator("include_obfuscation")
    @classmethod
    def _as_it_comes(cls, value: bool | None) -> bool | None:
        if value:
            raise refuse("events are not padded here; leave the field out")
        return value


class TextOptions(StrictBody):
    format: TextFormat | None = None
    verbosity: Annotated[str, shows(enum=["medium"])] | None = None

    @field_validator("verbosity")
    @classmethod
    def _as_the_model_is(cls, value: str | None) -> str | None:
        if value not in (None, "medium"):
            raise refuse("this is not supported; leave the field out")
        return value


class ReasoningOption(StrictBody):
    """Reasoning effort. "none" turns reasoning off."""

    effort: Effort = None


class ResponsesBody(GeneratingBody):
    """`POST /v1/responses`. null means the default."""

    model_config = ConfigDict(json_schema_extra=_RULES)

    model: ModelName
    input: InputItems
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None  # 0: only the most likely token
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Annotated[list[_Part], Field(fail_fast=True, max_length=64)] | None = None
    tools: ResponseTools | None = None
    tool_choice: ResponseChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    truncation: Annotated[str, shows(enum=["disabled"])] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: Annotated[bool, shows(const=False)] | None = None
    metadata: MetadataPairs | None = None
    user: _Name | None = None
    safety_identifier: _Name | None = None
    prompt_cache_key: _Name | None = None
    prompt_cache_retention: Retention | None = None
    reasoning: ReasoningOption | None = None
    conversation: _Unsupported = None
    prompt: _Unsupported = None
    context_management: _Unsupported = None
    moderation: _Unsupported = None

    _continued: Continued = PrivateAttr(Continued())

    @field_validator("tool_choice")
    @classmethod
    def _choice_among_tools(cls, value: ResponseChoice | None, info: ValidationInfo) -> ResponseChoice | None:
        check_choice(value, info.data.get("tools"))
        return value

    @field_validator(*_UNSUPPORTED)
    @classmethod
    def _not_supported(cls, value: Any) -> Any:
        if value not in (None, [], {}):
            raise refuse("this is not supported yet; leave the field out")
        return value

    @field_validator("background")
    @classmethod
    def _in_the_foreground(cls, value: bool | None) -> bool | None:
        if value:
            raise refuse("answers are not made in the background; leave it out and wait for the answer, or stream it")
        return value

    @field_validator("truncation")
    @classmethod
    def _nothing_dropped(cls, value: str | None) -> str | None:
        if value not in (None, "disabled"):
            raise refuse("nothing is dropped from a conversation here; use 'disabled', and send what fits the context")
        return value

    @field_validator("include")
    @classmethod
    def _known_parts(cls, value: list[str] | None) -> list[str] | None:
        for name in value or ():
            if name not in (LOGPROBS, *NOTHING_TO_INCLUDE):
                raise refuse(f"{name[:64]!r} is unknown; the one that has an effect is {LOGPROBS!r}")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("'stream_options' is allowed only when 'stream' is true")
        if self.top_logprobs and not self.wants_logprobs:
            raise refuse(f"'top_logprobs' is allowed only when 'include' has {LOGPROBS!r}")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def items(self) -> list[Item]:
        """Return the items of the request itself."""
        return [item.checked() for item in self.input]

    @property
    def continued(self) -> Continued:
        """The conversation that the request continues."""
        return self._continued

    def after(self, continued: Continued) -> Self:
        """Return a copy of the request that continues a conversation."""
        body = self.model_copy()
        body._continued = continued
        return body

    def generation(self) -> Generation:
        """Return the generation to run. Raises BadRequest if calls and results do not match."""
        items = [*self._continued.items, *self.items()]
        check_results(items)
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        offer = offer_of_functions(self.tools or (), self.tool_choice, parallel=self.parallel_tool_calls is not False)
        grammar = None if self.text is None or self.text.format is None else self.text.format.grammar()
        require_one_form(grammar, offer, "text.format")
        return Generation(
            model=self.model,
            prompts=(
                Conversation(
                    (*instructions, *messages_of(items)),
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
            max_tokens=self.max_output_tokens,
            max_tokens_field="max_output_tokens",
            service_tier=self.service_tier,
            keep_s=KEEP_S[self.prompt_cache_retention or "in_memory"],
            grammar=grammar,
        )

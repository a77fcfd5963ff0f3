"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's fields, strictly typed.

Unknown fields are ignored. Known fields that would change the answer and are not supported are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from moiety_platform.anthropic_api.basic_blocks import TextBlock, TextBlocks, text_of
from moiety_platform.anthropic_api.cache_control import CacheControl, longest
from moiety_platform.anthropic_api.content_blocks import keep_s_of
from moiety_platform.anthropic_api.context_management import ContextManagement
from moiety_platform.anthropic_api.output_config import JsonOutputFormat, OutputConfig
from moiety_platform.anthropic_api.tools import (
    NEEDS_TOOLS,
    MessageToolChoice,
    MessageTools,
    check_choice,
    offer_of,
    skipped_tools,
    with_defined,
)
from moiety_platform.anthropic_api.turns import (
    MessageTurn,
    check_definitions,
    check_results,
    defined_tools,
    last_effort,
    messages_of,
    skipped_blocks,
    tool_changes,
)
from moiety_platform.inference.body_fields import (
    INT32_MAX,
    MAX_MESSAGES,
    GeneratingBody,
    InferenceBody,
    ModelName,
    StopStrings,
    StrictBody,
    bounded,
    refuse,
    shows,
)
from moiety_platform.inference.field_support import ignored, mapped, refused
from moiety_platform.inference.generation import Conversation, Generation, ReasoningFields, unset_fields
from moiety_platform.openai_api.response_formats import format_beside
from moiety_text.tools.offer import ToolOffer
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import Sampling

_REASONING_FIELDS = ReasoningFields("output_config.effort", "thinking.type", "thinking.budget_tokens")
BILLING_PREFIX = "x-anthropic-billing-header:"  # of a system block that Claude Code sends for Anthropic's servers
_TIERS = {"auto": None, "standard_only": "default"}  # as OpenAI names them; None: the tenant's default class

_Object = dict[str, Any]


class Metadata(StrictBody):
    """The client's data about its own user, which is kept with the usage row."""

    user_id: Annotated[str, StringConstraints(max_length=512)] | None = None


class ThinkingOption(StrictBody):
    """Reasoning before the answer, on or off. `between_tools` and `adaptive` turn it on.

    `max_tokens` bounds reasoning and answer together, and `budget_tokens` the reasoning.
    """

    type: Annotated[
        Literal["enabled", "adaptive", "between_tools", "disabled"],
        mapped("All values except `disabled` enable reasoning, if the model supports it."),
    ]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    display: Annotated[
        Literal["summarized", "omitted", "updates"] | None,
        mapped("`omitted` removes the reasoning from the answer. The other values return all of it."),
    ] = None
    block_binding: Annotated[Any, ignored("Reasoning of earlier answers is used as the client sends it.")] = None


class BillingPolicy(StrictBody):
    type: Literal["billing_policy"]
    bill_to: Annotated[
        Literal["self"] | None,
        refused("requests are billed to the tenant of their key; leave the field out, or send 'self'", ["self"]),
    ] = None


class ConversationBody(InferenceBody):
    """`POST /v1/messages/count_tokens`, and the fields that `POST /v1/messages` shares with it."""

    model_config = ConfigDict(json_schema_extra={"allOf": [NEEDS_TOOLS]})

    model: ModelName
    messages: Annotated[
        list[MessageTurn],
        Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        bounded(lambda shape: shape.max_messages),
        AfterValidator(check_results),
        AfterValidator(check_definitions),
        shows(allOf=[{"prefixItems": [{"properties": {"role": {"const": "user"}}}]}]),
    ]
    system: TextBlocks | None = None
    tools: MessageTools | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[JsonOutputFormat | None, mapped("Older name of `output_config.format`.")] = None
    cache_control: CacheControl | None = None
    context_management: Annotated[
        ContextManagement | None,
        mapped(
            "`clear_thinking_20251015` and `clear_tool_uses_20250919` are applied, the second also if the "
            "conversation does not fit the model's context. Other edits have no effect."
        ),
    ] = None
    thread: Annotated[
        Any, refused("Conversations are not stored; send all messages each time, or use `/v1/responses`.")
    ] = None
    mcp_servers: Annotated[
        Any, refused("the server connects to no MCP servers; offer their tools in 'tools' and call them yourself", [[]])
    ] = None
    container: Annotated[Any, refused("the server runs no code, so there are no containers; leave it out", [{}])] = None
    compaction: Annotated[
        Any, refused("the server does not summarize conversations; ask for a summary in a message of the user's", [{}])
    ] = None
    billing_policy: BillingPolicy | None = None
    speed: Annotated[
        Literal["standard", "fast"] | None, ignored("The service class decides. Use `service_tier`, or another key.")
    ] = None

    @field_validator("thread")
    @classmethod
    def _no_thread(cls, value: Any) -> Any:
        """Refuse threads with a code that Anthropic's clients know. They then send the whole conversation."""
        if value is not None:
            raise refuse("conversations are not stored; send all messages each time", "thread_unsupported_request")
        return value

    @field_validator("messages")
    @classmethod
    def _user_begins(cls, value: list[MessageTurn]) -> list[MessageTurn]:
        if next((turn.role for turn in value if turn.role != "system"), None) != "user":
            raise refuse("the first message must be a user's")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _choice_among_tools(cls, value: MessageToolChoice | None, info: ValidationInfo) -> MessageToolChoice | None:
        if info.data.keys() >= {"tools", "messages"}:
            check_choice(value, with_defined(info.data["tools"], defined_tools(info.data["messages"])))
        return value

    def problems(self) -> Iterator[PydanticCustomError]:
        offer = self.offer()
        if offer is not None and offer.must_call and self.messages[-1].role == "assistant":
            yield refuse(
                "an answer that continues a last message of the assistant cannot be forced to call a tool; leave out "
                "that message, or choose 'auto' in 'tool_choice'"
            )
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            yield refuse("'output_format' is the older name of 'output_config.format'; send only one of the two")

    def skipped_entries(self) -> Iterator[str]:
        for place, block in enumerate(self.system or ()):
            if _is_for_billing(block):
                yield f"system.{place}"
        yield from skipped_tools(self.tools)
        if self.context_management is not None:
            yield from self.context_management.skipped_edits()
        yield from skipped_blocks(self.messages)

    def offer(self) -> ToolOffer | None:
        """Return the tools that the model may call, or None."""
        tools = with_defined(self.tools, defined_tools(self.messages))
        return offer_of(tools, self.tool_choice, tool_changes(self.messages))

    def grammar(self) -> GrammarSpec | None:
        """Return the grammar of the answer, or None for free text."""
        config_format = None if self.output_config is None else self.output_config.format
        chosen = config_format or self.output_format
        return None if chosen is None else chosen.grammar()

    def conversation(self) -> Conversation:
        """Return the conversation for the chat template.

        A last turn of the assistant becomes the beginning of the answer.
        """
        messages = messages_of(self.messages)
        prefill = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        system = text_of([block for block in self.system or () if not _is_for_billing(block)])
        if system:
            messages.insert(0, {"role": "system", "content": system})
        effort = None if self.output_config is None else self.output_config.effort
        return Conversation(
            tuple(messages),
            prefill,
            self.offer(),
            None if self.thinking is None else self.thinking.type != "disabled",
            effort=last_effort(self.messages) or effort,
            thought_budget=None if self.thinking is None else self.thinking.budget_tokens,
            reasoning_fields=_REASONING_FIELDS,
        )


def _is_for_billing(block: TextBlock) -> bool:
    """Return whether the block is for Anthropic's servers.

    It differs between conversations and is the first text, so no two of them would share a cached prefix.
    """
    return block.text.startswith(BILLING_PREFIX)


class MessagesBody(ConversationBody, GeneratingBody):
    """`POST /v1/messages`. null means the default."""

    max_tokens: Annotated[
        Annotated[int, Field(ge=0, le=INT32_MAX)],
        mapped(
            "The value is lowered to the rest of the model's context. With 0 one token is generated and billed, and "
            "the answer does not contain it."
        ),
    ]
    temperature: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None  # 0: only the most likely token
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None  # 0: off
    stop_sequences: StopStrings | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Annotated[str | None, ignored("Requests are processed where the server is installed.")] = None
    diagnostics: Annotated[
        _Object | None, ignored("Answers do not contain the reason why a prefix was not cached.")
    ] = None
    fallbacks: Annotated[Any, ignored("Only the requested model answers.")] = None
    fallback_credit_token: Annotated[Any, ignored("There are no credits for refusals.")] = None

    def generation(self) -> Generation:
        conversation = self.conversation()
        grammar = format_beside(conversation.tools, self.grammar())
        return Generation(
            model=self.model,
            prompts=(conversation,),
            num_choices=1,
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k or 0,
            ),
            unset_sampling=unset_fields(self),
            max_tokens=max(1, self.max_tokens),
            clamps_max_tokens=True,
            stop=tuple(self.stop_sequences or ()),
            service_tier=_TIERS[self.service_tier or "auto"],
            grammar=grammar,
            keep_s=self._keep_s(),
            context_edits=() if self.context_management is None else self.context_management.context_edits(),
        )

    @property
    def marks_end(self) -> bool:
        """True if the request asks to cache its whole prompt."""
        last = self.messages[-1].content
        return self.cache_control is not None or bool(last and last[-1].cache_control is not None)

    def _keep_s(self) -> float:
        marks = [self.cache_control, *(tool.cache_control for tool in self.tools or ())]
        in_turns = (keep_s_of(turn.content) for turn in self.messages)
        return max(longest(marks), keep_s_of(self.system or ()), *in_turns)

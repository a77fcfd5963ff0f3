"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's fields, strictly typed.

Unknown fields are ignored. Known fields that would change the answer and are not supported yet are refused by name.
"""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from moiety_platform.anthropic_api.blocks import (
    MessageTurn,
    TextBlocks,
    check_results,
    keep_s_of,
    text_of,
    turn_messages,
)
from moiety_platform.anthropic_api.cache_control import CacheControl, longest
from moiety_platform.anthropic_api.tools import NEEDS_TOOLS, MessageToolChoice, MessageTools, check_choice, offer_of
from moiety_platform.inference.body_fields import (
    INT32_MAX,
    MAX_MESSAGES,
    GeneratingBody,
    ModelName,
    StopStrings,
    StrictBody,
    bounded,
    refuse,
    shows,
)
from moiety_platform.inference.generation import Conversation, Generation
from moiety_wire.messages import Sampling

_TIERS = {"auto": None, "standard_only": "default"}  # as OpenAI names them; None: the tenant's default class

_Unsupported = Annotated[Any, shows(enum=[None, [], {}])]


class Metadata(StrictBody):
    """The client's data about its own user, which is kept with the usage row."""

    user_id: Annotated[str, StringConstraints(max_length=512)] | None = None


class ThinkingOption(StrictBody):
    """Reasoning before the answer, on or off.

    The model decides how much. `max_tokens` bounds reasoning and answer together, and `budget_tokens` is ignored.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class ConversationBody(StrictBody):
    """`POST /v1/messages/count_tokens`, and the fields that `POST /v1/messages` shares with it."""

    model_config = ConfigDict(json_schema_extra={"allOf": [NEEDS_TOOLS]})

    model: ModelName
    thread: Annotated[Any, shows(enum=[None])] = None
    messages: Annotated[
        list[MessageTurn],
        Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        bounded(lambda shape: shape.max_messages),
        AfterValidator(check_results),
        shows(allOf=[{"prefixItems": [{"properties": {"role": {"const": "user"}}}]}]),
    ]
    system: TextBlocks | None = None
    tools: MessageTools | None = None
    tool_choice: MessageToolChoice | None = None
    mcp_servers: _Unsupported = None
    container: _Unsupported = None
    output_config: _Unsupported = None
    output_format: _Unsupported = None
    thinking: ThinkingOption | None = None
    cache_control: CacheControl | None = None

    @field_validator("thread")
    @classmethod
    def _no_thread(cls, value: Any) -> Any:
        """Refuse threads with a code that Anthropic's clients know. They then send the whole conversation."""
        if value is not None:
            raise refuse("conversations are not kept; send all messages each time", "thread_unsupported_request")
        return value

    @field_validator("messages")
    @classmethod
    def _user_begins(cls, value: list[MessageTurn]) -> list[MessageTurn]:
        if value[0].role != "user":
            raise refuse("the first message must be a user's")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _choice_among_tools(cls, value: MessageToolChoice | None, info: ValidationInfo) -> MessageToolChoice | None:
        check_choice(value, info.data.get("tools"))
        return value

    @field_validator("mcp_servers", "container", "output_config", "output_format")
    @classmethod
    def _not_supported(cls, value: Any) -> Any:
        if value not in (None, [], {}):
            raise refuse("this is not supported yet; leave the field out")
        return value

    @model_validator(mode="after")
    def _begun_or_forced(self) -> Self:
        offer = offer_of(self.tools, self.tool_choice)
        if offer is not None and offer.must_call and self.messages[-1].role == "assistant":
            raise refuse(
                "an answer that is begun by a last message of the assistant's cannot be made to call a tool; leave out "
                "that message, or choose 'auto' in 'tool_choice'"
            )
        return self

    def conversation(self) -> Conversation:
        """Return the conversation for the chat template.

        Consecutive turns of one role become one message. A last turn of the assistant becomes the beginning of the
        answer.
        """
        messages = [
            message
            for role, group in groupby(self.messages, key=lambda turn: turn.role)
            for message in turn_messages(role, list(group))
        ]
        prefill = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
        system = text_of(self.system or [])
        if system:
            messages.insert(0, {"role": "system", "content": system})
        offer = offer_of(self.tools, self.tool_choice)
        thinks = None if self.thinking is None else self.thinking.type != "disabled"
        return Conversation(tuple(messages), prefill, offer, thinks)


class MessagesBody(ConversationBody, GeneratingBody):
    """`POST /v1/messages`. null means the default."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    temperature: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None  # 0: only the most likely token
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None  # 0: off
    stop_sequences: StopStrings | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def generation(self) -> Generation:
        return Generation(
            model=self.model,
            prompts=(self.conversation(),),
            num_choices=1,
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k or 0,
            ),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            service_tier=_TIERS[self.service_tier or "auto"],
            keep_s=self._keep_s(),
        )

    def _keep_s(self) -> float:
        marks = [self.cache_control, *(tool.cache_control for tool in self.tools or ())]
        in_turns = (keep_s_of(turn.content) for turn in self.messages)
        return max(longest(marks), keep_s_of(self.system or ()), *in_turns)

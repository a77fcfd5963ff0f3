"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's fields, strictly typed.

Unknown fields are ignored, as `cache_control` is: prefixes are cached without being marked. What is known, would change
the answer and is not supported yet is refused by name.
"""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, StringConstraints, field_validator

from moiety_platform.completions.fields import (
    INT32_MAX,
    MAX_MESSAGES,
    MAX_PARTS,
    GeneratingBody,
    ModelName,
    StopStrings,
    StrictBody,
    bounded,
    refuse,
    shows,
)
from moiety_platform.completions.generation import Conversation, Generation
from moiety_platform.completions.limits import ShapeLimits
from moiety_wire.messages import Sampling

ROLES = ("user", "assistant")

_TIERS = {"auto": None, "standard_only": "default"}  # in OpenAI's words; without one the tenant's own class serves


class TextBlock(StrictBody):
    type: Annotated[str, shows(enum=["text"])]
    text: str

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        if value != "text":
            raise refuse(f"blocks of type {value[:64]!r} are not supported yet; send blocks of type 'text' only")
        return value


class _AsBlocks:
    """A string is short for one block. One form inside means that complaints name the place."""

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if value is not None and not isinstance(value, list):
            raise refuse("it must be a string or a list of text blocks")
        return value

    def shown(self, schema: dict[str, Any], _settings: ShapeLimits) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, schema]}


Blocks = Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_PARTS), BeforeValidator(_AsBlocks())]
Unsupported = Annotated[Any, shows(enum=[None, [], {}])]


def _text_of(blocks: list[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


class Turn(StrictBody):
    role: Annotated[str, shows(enum=list(ROLES))]
    content: Blocks

    @field_validator("role")
    @classmethod
    def _known_role(cls, value: str) -> str:
        if value == "system":
            raise refuse("a system prompt is no message; send it as 'system'")
        if value not in ROLES:
            raise refuse(f"{value[:64]!r} is not a role; use one of {', '.join(ROLES)}")
        return value


class Metadata(StrictBody):
    """What a client says of its own user. Nothing is decided by it."""

    user_id: Annotated[str, StringConstraints(max_length=512)] | None = None


class ConversationBody(StrictBody):
    """`POST /v1/messages/count_tokens`, and what `POST /v1/messages` has of it."""

    model: ModelName
    messages: Annotated[
        list[Turn],
        Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        bounded(lambda shape: shape.max_messages),
        shows(allOf=[{"prefixItems": [{"properties": {"role": {"const": "user"}}}]}]),
    ]
    system: Blocks | None = None
    tools: Unsupported = None
    tool_choice: Unsupported = None
    mcp_servers: Unsupported = None
    container: Unsupported = None
    output_config: Unsupported = None
    output_format: Unsupported = None
    thinking: Annotated[Any, shows(enum=[None, {"type": "disabled"}])] = None

    @field_validator("messages")
    @classmethod
    def _user_begins(cls, value: list[Turn]) -> list[Turn]:
        if value[0].role != "user":
            raise refuse("the first message must be a user's")
        return value

    @field_validator("tools", "tool_choice", "mcp_servers", "container", "output_config", "output_format")
    @classmethod
    def _not_supported(cls, value: Any) -> Any:
        if value not in (None, [], {}):
            raise refuse("this is not supported yet; leave the field out")
        return value

    @field_validator("thinking")
    @classmethod
    def _no_thinking(cls, value: Any) -> Any:
        if value is not None and value != {"type": "disabled"}:
            raise refuse("thinking is not supported yet; leave the field out")
        return value

    def conversation(self) -> Conversation:
        """For the model's chat template: turns of one role in succession are one, and an assistant's at the end is how
        the answer begins."""
        turns = [
            {"role": role, "content": "\n".join(_text_of(turn.content) for turn in group)}
            for role, group in groupby(self.messages, key=lambda turn: turn.role)
        ]
        prefill = turns.pop()["content"] if turns[-1]["role"] == "assistant" else ""
        system = _text_of(self.system or [])
        if system:
            turns.insert(0, {"role": "system", "content": system})
        return Conversation(tuple(turns), prefill)


class MessagesBody(ConversationBody, GeneratingBody):
    """`POST /v1/messages`. null means the default."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    temperature: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    top_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None  # 0: only the best token
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
        )

"""Tools and tool choice in Anthropic's fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from moiety_platform.anthropic_api.cache_control import CacheControl
from moiety_platform.inference.body_fields import StrictBody, refuse, shows
from moiety_platform.inference.tool_fields import (
    MAX_TOOLS,
    ToolName,
    ToolSchema,
    differing,
    few_tools,
    needs_tools,
    require_among,
    tool_of,
)
from moiety_text.tools.offer import ToolOffer


class MessageTool(StrictBody):
    """A function that the client provides."""

    type: Annotated[str, shows(enum=["custom"])] | None = None
    name: ToolName
    description: str | None = None
    input_schema: ToolSchema
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @field_validator("type")
    @classmethod
    def _only_the_clients(cls, value: str | None) -> str | None:
        if value not in (None, "custom"):
            raise refuse(f"tools of type {value[:64]!r} are not supported; send tools of your own, with 'input_schema'")
        return value


class MessageToolChoice(StrictBody):
    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"type": {"const": "tool"}}},
            "then": {"required": ["name"], "properties": {"name": {"type": "string"}}},
        }
    )

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[ToolName | None, Field(validate_default=True)] = None
    disable_parallel_tool_use: bool | None = None

    @field_validator("name")
    @classmethod
    def _named_if_one(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("type") == "tool":
            raise PydanticKnownError("missing")
        return value


MessageTools = Annotated[
    list[MessageTool],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    few_tools,
    needs_tools,
    differing(lambda tool: tool.name),
]


NEEDS_TOOLS = needs_tools({"type": "object", "properties": {"type": {"enum": ["any", "tool"]}}})


def check_choice(choice: MessageToolChoice | None, tools: Sequence[MessageTool] | None) -> None:
    """Raise a validator's error if `tools` do not allow the choice."""
    if choice is not None and choice.type in ("any", "tool"):
        require_among([tool.name for tool in tools or ()], choice.name if choice.type == "tool" else None)


def offer_of(tools: Sequence[MessageTool] | None, choice: MessageToolChoice | None) -> ToolOffer | None:
    """Return the tools that the model may call, or None."""
    if not tools or (choice is not None and choice.type == "none"):
        return None
    told = tuple(tool_of(tool.name, tool.description, tool.input_schema, strict=tool.strict) for tool in tools)
    if choice is None:
        return ToolOffer(told)
    return ToolOffer(
        told,
        must_call=choice.type in ("any", "tool"),
        forced=choice.name if choice.type == "tool" else None,
        parallel=not choice.disable_parallel_tool_use,
    )

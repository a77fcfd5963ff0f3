"""Tools and tool choice in Anthropic's fields.

Tools that Anthropic runs, and those that need a model that sees, are skipped, unless `tool_choice` requires a call of
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

from moiety_platform.anthropic_api.cache_control import CacheControl
from moiety_platform.anthropic_api.client_tools import CLIENT_TOOLS
from moiety_platform.inference.body_fields import StrictBody, missing, refuse
from moiety_platform.inference.field_support import FieldTreatment, ignored, mapped, support_of
from moiety_platform.inference.tool_fields import (
    MAX_TOOLS,
    ToolName,
    ToolSchema,
    few_tools,
    needs_tools,
    refuse_equal_names,
    require_among,
    tool_of,
)
from moiety_text.tools.offer import Tool, ToolOffer

CUSTOM = "custom"
HOSTED_SEARCH = "tool_search_tool"  # beginning of the types of the search tools that Anthropic runs
MAX_EXAMPLES = 64

_IS_CUSTOM: dict[str, Any] = {"properties": {"type": {"enum": [None, CUSTOM]}}}
_NAMED: dict[str, Any] = {"name": {"type": "string"}}
_UNCHANGED: Mapping[str, bool] = MappingProxyType({})
_EXAMPLES = "\n\nExamples of its input:\n"


class MessageTool(StrictBody):
    """Tool of a conversation: a function that the client provides, or one that Anthropic defines, by its type."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": _IS_CUSTOM,
            "then": {"required": ["name", "input_schema"], "properties": _NAMED | {"input_schema": {"type": "object"}}},
            "else": {
                "if": {"properties": {"type": {"enum": list(CLIENT_TOOLS)}}},
                "then": {"required": ["name"], "properties": _NAMED},
            },
        }
    )

    type: Annotated[
        str | None,
        mapped("Anthropic's `bash`, `text_editor` and `memory` tools are functions. Other types are skipped."),
    ] = None
    name: ToolName | None = None
    description: str | None = None
    input_schema: ToolSchema | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    input_examples: Annotated[
        Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_EXAMPLES)] | None,
        mapped("The examples are added to the description."),
    ] = None
    defer_loading: Annotated[
        bool | None,
        mapped(
            "The model is shown the tool once a `tool_reference` or `tool_addition` has named it. Beside a search tool "
            "of Anthropic's, which is skipped, all tools are shown from the beginning."
        ),
    ] = None
    allowed_callers: Annotated[Any, ignored("The model is the only caller.")] = None
    eager_input_streaming: Annotated[bool | None, ignored("A call is sent once it is complete.")] = None

    @model_validator(mode="after")
    def _has_own_fields(self) -> Self:
        if self.is_known and self.name is None:
            raise missing("name")
        if self.is_custom and self.input_schema is None:
            raise missing("input_schema")
        return self

    @property
    def is_custom(self) -> bool:
        return self.type in (None, CUSTOM)

    @property
    def is_known(self) -> bool:
        """True if the model can call the tool."""
        return self.is_custom or self.type in CLIENT_TOOLS

    def tool(self) -> Tool:
        """Return the tool for the model."""
        assert self.name is not None and self.is_known, "validated, and not skipped"
        description, parameters = self.description, self.input_schema
        if not self.is_custom:
            defined = CLIENT_TOOLS[str(self.type)]
            description, parameters = defined.description, dict(defined.parameters)
        if self.input_examples:
            examples = "\n".join(msgspec.json.encode(example).decode() for example in self.input_examples)
            description = f"{description or ''}{_EXAMPLES}{examples}".lstrip()
        return tool_of(self.name, description, parameters, strict=self.strict)


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


def _check_tools(value: list[MessageTool]) -> list[MessageTool]:
    refuse_equal_names([tool.name or "" for tool in value if tool.is_known])
    return value


MessageTools = Annotated[
    list[MessageTool], Field(fail_fast=True, max_length=MAX_TOOLS), few_tools, AfterValidator(_check_tools)
]
NEEDS_TOOLS = needs_tools({"type": "object", "properties": {"type": {"enum": ["any", "tool"]}}})

_IGNORED = tuple(
    name for name in MessageTool.model_fields if support_of(MessageTool, name).treatment is FieldTreatment.IGNORED
)


def check_choice(choice: MessageToolChoice | None, tools: Sequence[MessageTool] | None) -> None:
    """Raise a validator's error if `tools` do not allow the choice."""
    if choice is None or choice.type not in ("any", "tool"):
        return
    for tool in tools or ():
        if choice.type == "tool" and tool.name == choice.name and not tool.is_known:
            raise refuse(
                f"the tool {choice.name!r} is of the type {str(tool.type)[:64]!r}, which this server does not run; "
                "choose 'auto', or offer a tool of your own"
            )
    names = [tool.name or "" for tool in tools or () if tool.is_known]
    require_among(names, choice.name if choice.type == "tool" else None)


def with_defined(tools: Sequence[MessageTool] | None, defined: Sequence[MessageTool]) -> Sequence[MessageTool]:
    """Return the tools of a request and those that its messages define, which replace others of the same name."""
    if not defined:
        return tools or ()
    names = {tool.name for tool in defined}
    return [*(tool for tool in tools or () if tool.name not in names), *defined]


def offer_of(
    tools: Sequence[MessageTool] | None, choice: MessageToolChoice | None, changes: Mapping[str, bool] = _UNCHANGED
) -> ToolOffer | None:
    """Return the tools that the model may call, or None.

    `changes` say of tools by name whether the conversation has shown or withdrawn them; otherwise those are shown that
    are not deferred. A tool that the choice names is always shown.
    """
    choice = choice or MessageToolChoice(type="auto")
    forced = choice.name if choice.type == "tool" else None
    known = [tool for tool in tools or () if tool.is_known]
    must_show = any(str(tool.type).startswith(HOSTED_SEARCH) for tool in tools or ())  # nothing else can find them
    told = tuple(
        tool.tool()
        for tool in known
        if tool.name == forced or changes.get(tool.name or "", must_show or not tool.defer_loading)
    )
    if not told or choice.type == "none":
        return None
    return ToolOffer(told, choice.type in ("any", "tool"), forced, parallel=not choice.disable_parallel_tool_use)


def skipped_tools(tools: Sequence[MessageTool] | None) -> Iterator[str]:
    """Yield the paths of tools that are skipped, and the names of fields of other tools that have no effect."""
    unread: set[str] = set()
    for number, tool in enumerate(tools or ()):
        if not tool.is_known:
            yield f"tools.{number}"
        else:
            unread.update(name for name in _IGNORED if getattr(tool, name) is not None)
    yield from (f"tools.*.{name}" for name in sorted(unread))

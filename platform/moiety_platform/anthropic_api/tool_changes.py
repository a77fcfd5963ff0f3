"""Changes of the offered tools within a conversation: blocks of system messages that show, define or withdraw one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from moiety_platform.anthropic_api.basic_blocks import ContentBlock
from moiety_platform.anthropic_api.tools import MessageTool
from moiety_platform.inference.body_fields import StrictBody
from moiety_platform.inference.tool_fields import ToolName
from moiety_platform.inference.typed_values import named_type


class NamedTool(StrictBody):
    """A tool that the request has elsewhere, by its name."""

    type: Literal["tool_reference"]
    name: ToolName


class DefinedTool(StrictBody):
    """A tool that is defined here, with the fields of an entry of `tools`."""

    type: Literal["tool_definition"]
    definition: MessageTool


class ForeignTool(StrictBody):
    """A tool of an MCP server that Anthropic connects to."""

    type: str


_SCHEMAS: Mapping[str, type[StrictBody]] = MappingProxyType(
    {"tool_reference": NamedTool, "tool_definition": DefinedTool}
)
_CHANGED = named_type(_SCHEMAS, ForeignTool, NamedTool | DefinedTool | ForeignTool)


class ToolChangeBlock(ContentBlock):
    """Withdrawal of a tool, its return, or its definition. Changes of tools of MCP servers have no effect."""

    type: Literal["tool_addition", "tool_removal"]
    tool: Annotated[NamedTool | DefinedTool | ForeignTool, _CHANGED]

    @property
    def defined_tool(self) -> MessageTool | None:
        """The tool that the block defines for the model, if it defines one."""
        if self.type != "tool_addition" or not isinstance(self.tool, DefinedTool):
            return None
        return self.tool.definition if self.tool.definition.is_known else None

    @property
    def tool_name(self) -> str | None:
        """Name of the tool, or None where the block has no effect."""
        if isinstance(self.tool, NamedTool):
            return self.tool.name
        return None if self.defined_tool is None else self.defined_tool.name

    @property
    def is_skipped(self) -> bool:
        return self.tool_name is None

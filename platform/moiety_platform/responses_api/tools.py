"""Tools in OpenAI's fields for responses.

Tools that OpenAI's servers run themselves, and tools of an unknown type, are skipped, unless `tool_choice` requires
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, ValidationInfo

from moiety_platform.inference.body_fields import INT32_MAX, StrictBody, refuse, shape_of
from moiety_platform.inference.custom_tools import CustomGrammar, custom_tool_of
from moiety_platform.inference.field_support import ignored
from moiety_platform.inference.grammar_fields import STORED_GRAMMAR_BYTES, GrammarDefinition
from moiety_platform.inference.shape_limits import ShapeLimits
from moiety_platform.inference.tool_fields import MAX_TOOLS, ToolName, ToolSchema, few_tools, tool_of
from moiety_platform.inference.typed_values import as_named_type
from moiety_platform.responses_api.calls import BUILT_IN, OfferedTool, ToolKind, name_for_model
from moiety_platform.responses_api.items import Item

_TYPE = re.compile(r"[a-z0-9_]{1,64}", re.ASCII)
_Flag = Annotated[bool | None, ignored("All tools are offered from the beginning.")]
_Callers = Annotated[Any, ignored("Programs of the model are not run; every call goes to the client.")]
_Schema = Annotated[Any, ignored("Results are passed to the model as they are.")]


class ResponseTool(StrictBody):
    """Base of the tools in a request."""

    type: str

    def offered(self) -> Iterator[OfferedTool]:
        """Yield the functions that represent the tool for the model."""
        yield from ()

    def fields(self) -> dict[str, Any]:
        """Return the tool as the answer repeats it."""
        return self.model_dump(mode="json", exclude_none=True)


class ResponseFunctionTool(ResponseTool):
    """A function that the client provides."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: ToolSchema | None = None
    strict: bool | None = None
    defer_loading: _Flag = None
    allowed_callers: _Callers = None
    output_schema: _Schema = None

    def offered(self) -> Iterator[OfferedTool]:
        yield self.within(None)

    def within(self, namespace: str | None) -> OfferedTool:
        name = name_for_model(self.name, namespace)
        tool = tool_of(name, self.description, self.parameters, strict=self.strict)
        return OfferedTool(ToolKind.FUNCTION, tool, self.name, namespace)

    def fields(self) -> dict[str, Any]:
        return {
            "type": ToolKind.FUNCTION.value,
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


class PlainInput(StrictBody):
    type: Literal["text"]


class GrammarInput(StrictBody):
    """Grammar of a custom tool's input."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: Annotated[GrammarDefinition, Field(min_length=1)]


class FreeTextTool(ResponseTool):
    """A tool of the client whose input is free text, or text that follows a grammar."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[PlainInput | GrammarInput, Field(discriminator="type")] | None = None
    defer_loading: _Flag = None
    allowed_callers: _Callers = None

    def offered(self) -> Iterator[OfferedTool]:
        yield self.within(None)

    def within(self, namespace: str | None) -> OfferedTool:
        grammar = None
        if isinstance(self.format, GrammarInput):
            grammar = CustomGrammar(self.format.syntax, self.format.definition)
        tool = custom_tool_of(name_for_model(self.name, namespace), self.description, grammar)
        return OfferedTool(ToolKind.CUSTOM, tool, self.name, namespace)


class BuiltInTool(ResponseTool):
    """A tool whose function the API defines, and whose calls the client executes."""

    type: Literal["apply_patch", "local_shell"]
    allowed_callers: _Callers = None

    def offered(self) -> Iterator[OfferedTool]:
        kind = ToolKind(self.type)
        yield OfferedTool(kind, BUILT_IN[kind], kind.value)


class ShellEnvironment(StrictBody):
    type: str


class ShellTool(ResponseTool):
    """A shell of the client. In a container of OpenAI's it is skipped."""

    type: Literal["shell"]
    environment: ShellEnvironment | None = None
    allowed_callers: _Callers = None

    def offered(self) -> Iterator[OfferedTool]:
        if self.environment is None or self.environment.type == "local":
            yield OfferedTool(ToolKind.SHELL, BUILT_IN[ToolKind.SHELL], ToolKind.SHELL.value)


class SearchTool(ResponseTool):
    """A search for further tools. Only one that the client executes is offered."""

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: ToolSchema | None = None

    def offered(self) -> Iterator[OfferedTool]:
        if self.execution == "client":
            tool = tool_of(ToolKind.TOOL_SEARCH.value, self.description, self.parameters)
            yield OfferedTool(ToolKind.TOOL_SEARCH, tool, ToolKind.TOOL_SEARCH.value)


class SkippedTool(ResponseTool):
    """A tool that cannot be offered."""


_NAMED: dict[str, type[ResponseTool]] = {"function": ResponseFunctionTool, "custom": FreeTextTool}


def _as_named_tool(value: Any, info: ValidationInfo) -> ResponseTool:
    return as_named_type(value, info, _NAMED, SkippedTool)


class NamespaceTool(ResponseTool):
    """Tools of one namespace. The model calls them by both names."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[
        list[
            Annotated[
                ResponseTool,
                PlainValidator(
                    _as_named_tool,
                    json_schema_input_type=ResponseFunctionTool | FreeTextTool,
                ),
            ]
        ],
        Field(fail_fast=True, max_length=MAX_TOOLS),
        few_tools,
    ]

    def offered(self) -> Iterator[OfferedTool]:
        for tool in self.tools:
            if isinstance(tool, ResponseFunctionTool | FreeTextTool):
                yield tool.within(self.name)

    def fields(self) -> dict[str, Any]:
        fields = {"type": self.type, "name": self.name, "description": self.description or ""}
        return {**fields, "tools": [tool.fields() for tool in self.tools if not isinstance(tool, SkippedTool)]}


_TOOLS: dict[str, type[ResponseTool]] = {
    **_NAMED,
    "namespace": NamespaceTool,
    "apply_patch": BuiltInTool,
    "local_shell": BuiltInTool,
    "shell": ShellTool,
    "tool_search": SearchTool,
}
_KNOWN = (
    ResponseFunctionTool | FreeTextTool | NamespaceTool | BuiltInTool | ShellTool | SearchTool | SkippedTool
)  # for the document


def _as_tool(value: Any, info: ValidationInfo) -> ResponseTool:
    return as_named_type(value, info, _TOOLS, SkippedTool)


def _check_names(value: list[ResponseTool], info: ValidationInfo) -> list[ResponseTool]:
    check_offered(offered_by(value), shape_of(info).max_tools)
    return value


ResponseTools = Annotated[
    list[Annotated[ResponseTool, PlainValidator(_as_tool, json_schema_input_type=_KNOWN)]],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    few_tools,
    AfterValidator(_check_names),
]


_STORED = TypeAdapter(list[Annotated[ResponseTool, PlainValidator(_as_tool)]])


_UNBOUNDED = ShapeLimits(max_tools=INT32_MAX, max_tool_schema_bytes=INT32_MAX, max_grammar_bytes=STORED_GRAMMAR_BYTES)


def tools_of_item(item: Item) -> list[ResponseTool]:
    """Return the tools in a stored item, which met the limits when a client sent them."""
    return _STORED.validate_python(item["tools"], context=_UNBOUNDED)


def offered_by(tools: Sequence[ResponseTool]) -> list[OfferedTool]:
    """Return the functions of the model that the tools stand for."""
    return [offered for tool in tools for offered in tool.offered()]


def check_offered(offered: Sequence[OfferedTool], max_tools: int) -> None:
    """Raise a validator's error if there are too many functions, or two with the same name."""
    if len(offered) > max_tools:
        raise refuse(f"there are {len(offered):,} tools in it, those of namespaces counted; it may have {max_tools:,}")
    names = set()
    for one in offered:
        if one.tool.name in names:
            raise refuse(f"two tools have the name {one.tool.name!r}; give each its own")
        names.add(one.tool.name)


def skipped_types(tools: Sequence[ResponseTool]) -> Iterator[str]:
    """Yield the types of tools that are not offered to the model."""
    for tool in tools:
        if not isinstance(tool, NamespaceTool) and not any(tool.offered()):
            yield readable_type(tool.type)


def readable_type(kind: str) -> str:
    """Return a client's name of a type for a header."""
    return kind if _TYPE.fullmatch(kind) else "unknown"

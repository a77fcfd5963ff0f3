"""OpenAI's tool fields of chat requests.

Tools of a type that is unknown here, such as hosted ones, are skipped, unless `tool_choice` requires a call of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from moiety_platform.inference.body_fields import StrictBody, missing, refuse, shows
from moiety_platform.inference.custom_tools import CustomGrammar, arguments_of, custom_tool_of
from moiety_platform.inference.grammar_fields import GrammarDefinition
from moiety_platform.inference.tool_fields import (
    MAX_TOOLS,
    ArgumentsText,
    ToolName,
    ToolSchema,
    call_for_template,
    few_tools,
    needs_tools,
    refuse_equal_names,
    require_among,
    tool_of,
)
from moiety_platform.openai_api.responses_form import nested_tool
from moiety_text.tools.offer import Tool, ToolOffer

CHOICES = ("none", "auto", "required")
KNOWN_TYPES = ("function", "custom")
_CHOICE_FORMS = (
    'it must be \'none\', \'auto\', \'required\', {"type": "function", "function": {"name": "…"}}, '
    '{"type": "custom", "custom": {"name": "…"}} or {"type": "allowed_tools", "allowed_tools": {"mode": "auto", '
    '"tools": […]}}'
)


def _call_type(value: str) -> str:
    if value not in KNOWN_TYPES:
        raise refuse(f"{value[:64]!r} is not supported; use 'function' or 'custom'")
    return value


_CallType = Annotated[
    str,
    BeforeValidator(lambda value: _call_type(value) if isinstance(value, str) else value),
    shows(enum=list(KNOWN_TYPES)),
]


def _requires_own_field(default: str) -> dict[str, Any]:
    """Return a JSON schema that requires the field named by `type`, whose default is `default`."""
    return {
        "allOf": [
            {
                "if": {
                    "properties": {"type": {"const": call_type}},
                    **({} if call_type == default else {"required": ["type"]}),
                },
                "then": {"required": [call_type], "properties": {call_type: {"type": "object"}}},
            }
            for call_type in KNOWN_TYPES
        ]
    }


class FunctionTool(StrictBody):
    name: ToolName
    description: str | None = None
    parameters: ToolSchema | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """Return the tool for the model."""
        return tool_of(self.name, self.description, self.parameters, strict=self.strict)


class CustomToolGrammar(StrictBody):
    syntax: Literal["lark", "regex"]
    definition: GrammarDefinition


class CustomToolFormat(StrictBody):
    """Format of a custom tool's input. A grammar is shown to the model, and enforced by engines with grammars."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"type": {"const": "grammar"}}},
            "then": {"required": ["grammar"], "properties": {"grammar": {"type": "object"}}},
        }
    )

    type: Literal["text", "grammar"]
    grammar: CustomToolGrammar | None = None

    @model_validator(mode="after")
    def _has_grammar(self) -> Self:
        if self.type == "grammar" and self.grammar is None:
            raise missing("grammar")
        return self


class CustomTool(StrictBody):
    """Tool whose input is text."""

    name: ToolName
    description: str | None = None
    format: CustomToolFormat | None = None

    def tool(self) -> Tool:
        """Return the tool for the model."""
        grammar = None if self.format is None or self.format.type == "text" else self.format.grammar
        found = None if grammar is None else CustomGrammar(grammar.syntax, grammar.definition)
        return custom_tool_of(self.name, self.description, found)


class ChatTool(StrictBody):
    """Tool of a chat. Tools of other types are skipped."""

    model_config = ConfigDict(json_schema_extra=_requires_own_field("function"))

    type: str = "function"
    function: FunctionTool | None = None
    custom: CustomTool | None = None

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, value: Any) -> Any:
        return nested_tool(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _has_own_field(self) -> Self:
        if self.type in KNOWN_TYPES and self.known is None:
            raise missing(self.type)
        return self

    @property
    def known(self) -> FunctionTool | CustomTool | None:
        """The tool of a known type, or None."""
        return self.function if self.type == "function" else self.custom if self.type == "custom" else None


class CalledFunction(StrictBody):
    name: ToolName
    arguments: ArgumentsText


class CalledCustomTool(StrictBody):
    name: ToolName
    input: str


class ChatCall(StrictBody):
    """A tool call of an earlier answer."""

    model_config = ConfigDict(json_schema_extra=_requires_own_field("function"))

    id: str
    type: _CallType = "function"
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None

    @model_validator(mode="after")
    def _has_own_field(self) -> Self:
        if (self.function if self.type == "function" else self.custom) is None:
            raise missing(self.type)
        return self

    def for_template(self) -> dict[str, Any]:
        if self.type == "custom":
            assert self.custom is not None, "validated"
            return call_for_template(self.id, self.custom.name, arguments_of(self.custom.input))
        assert self.function is not None, "validated"
        return call_for_template(self.id, self.function.name, self.function.arguments)


class ChosenName(StrictBody):
    name: ToolName


class ChosenTool(StrictBody):
    """Tool choice that names a tool. A tool of another type than these cannot be called."""

    model_config = ConfigDict(json_schema_extra=_requires_own_field(""))

    type: _CallType
    function: ChosenName | None = None
    custom: ChosenName | None = None

    @model_validator(mode="after")
    def _has_own_field(self) -> Self:
        if (self.function if self.type == "function" else self.custom) is None:
            raise missing(self.type)
        return self

    @property
    def name(self) -> str:
        chosen = self.function if self.type == "function" else self.custom
        assert chosen is not None, "validated"
        return chosen.name


class AllowedTool(StrictBody):
    """Entry of the allowed tools. Entries of other types are skipped, as such tools are."""

    model_config = ConfigDict(json_schema_extra=_requires_own_field(""))

    type: str
    function: ChosenName | None = None
    custom: ChosenName | None = None

    @model_validator(mode="after")
    def _has_own_field(self) -> Self:
        if self.type in KNOWN_TYPES and self.name is None:
            raise missing(self.type)
        return self

    @property
    def name(self) -> str | None:
        chosen = self.function if self.type == "function" else self.custom if self.type == "custom" else None
        return None if chosen is None else chosen.name


class AllowedTools(StrictBody):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class AllowedToolsChoice(StrictBody):
    """Tool choice that names the tools that the model may call. The others are not shown to the model."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Tool choice of a request. `mode` is one of CHOICES. `name` is the required tool, if the request names one.

    `allowed` has the names of the tools that may be called, or is None if all may.
    """

    mode: str
    name: str | None = None
    allowed: frozenset[str] | None = None


def _as_choice(value: Any) -> ToolChoice:
    if isinstance(value, str) and value in CHOICES:
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise refuse(_CHOICE_FORMS)
    if value.get("type") == "allowed_tools":
        chosen = AllowedToolsChoice.model_validate(value).allowed_tools
        names = frozenset(tool.name for tool in chosen.tools if tool.name is not None)
        return ToolChoice(chosen.mode, allowed=names)
    return ToolChoice("required", ChosenTool.model_validate(value).name)


def _as_function_choice(value: Any) -> ToolChoice:
    if isinstance(value, str) and value in ("none", "auto"):
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise refuse("it must be 'none', 'auto' or {\"name\": \"…\"}")
    return ToolChoice("required", ChosenName.model_validate(value).name)


def _check_tools(value: list[ChatTool]) -> list[ChatTool]:
    refuse_equal_names([tool.name for tool in known_tools(value)])
    return value


def _check_functions(value: list[FunctionTool]) -> list[FunctionTool]:
    refuse_equal_names([function.name for function in value])
    return value


ChatTools = Annotated[
    list[ChatTool], Field(fail_fast=True, max_length=MAX_TOOLS), few_tools, AfterValidator(_check_tools)
]
ChatFunctions = Annotated[
    list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS), few_tools, AfterValidator(_check_functions)
]
ChatCalls = Annotated[list[ChatCall], Field(fail_fast=True, max_length=MAX_TOOLS)]
ChatChoice = Annotated[
    ToolChoice,
    PlainValidator(
        _as_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | ChosenTool | AllowedToolsChoice,
    ),
]
FunctionChoice = Annotated[
    ToolChoice, PlainValidator(_as_function_choice, json_schema_input_type=Literal["none", "auto"] | ChosenName)
]
NEEDS_TOOLS = needs_tools({"anyOf": [{"const": "required"}, {"type": "object"}]})  # for both OpenAI APIs


def known_tools(tools: Sequence[ChatTool] | None) -> list[FunctionTool | CustomTool]:
    """Return the tools of known types. The others are skipped."""
    return [known for tool in tools or () if (known := tool.known) is not None]


def skipped_tools(tools: Sequence[ChatTool] | None) -> Iterator[str]:
    """Yield the paths of the tools that are skipped."""
    return (f"tools.{number}" for number, tool in enumerate(tools or ()) if tool.known is None)


def check_choice(choice: ToolChoice | None, names: Sequence[str], field: str = "tools") -> None:
    """Raise a validator's error if the tools with these names, which are in `field`, do not allow the choice."""
    if choice is None:
        return
    for unknown in sorted((choice.allowed or frozenset()).difference(names))[:1]:
        require_among(names, unknown)
    if choice.mode == "required":
        require_among(names if choice.allowed is None else sorted(choice.allowed), choice.name, field)


def offer_of(
    tools: Sequence[ChatTool] | None, choice: ToolChoice | None = None, *, parallel: bool = True
) -> ToolOffer | None:
    """Return the tools that the model may call, or None."""
    return offer_of_functions(known_tools(tools), choice, parallel=parallel)


def offer_of_functions(
    functions: Sequence[FunctionTool | CustomTool], choice: ToolChoice | None, *, parallel: bool
) -> ToolOffer | None:
    """Return the tools that the model may call, given as bare functions and custom tools, or None."""
    choice = choice or ToolChoice("auto")
    allowed = choice.allowed
    offered = tuple(function.tool() for function in functions if allowed is None or function.name in allowed)
    if not offered or choice.mode == "none":
        return None
    return ToolOffer(offered, choice.mode == "required", choice.name, parallel)

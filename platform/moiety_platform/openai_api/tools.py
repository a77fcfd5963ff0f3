"""OpenAI's tool fields of chat requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from moiety_platform.inference.body_fields import StrictBody, refuse, shows
from moiety_platform.inference.tool_fields import (
    MAX_TOOLS,
    ArgumentsText,
    ToolName,
    ToolSchema,
    call_for_template,
    differing,
    few_tools,
    needs_tools,
    require_among,
    tool_of,
)
from moiety_text.tools.offer import ToolOffer

CHOICES = ("none", "auto", "required")
_CHOICE_FORMS = 'it must be \'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": "…"}}'


def _function(value: str) -> str:
    if value != "function":
        raise refuse(f"{value[:64]!r} is not supported; use 'function'")
    return value


_FunctionType = Annotated[
    str,
    BeforeValidator(lambda value: _function(value) if isinstance(value, str) else value),
    shows(enum=["function"]),
]


class FunctionTool(StrictBody):
    name: ToolName
    description: str | None = None
    parameters: ToolSchema | None = None
    strict: bool | None = None


class ChatTool(StrictBody):
    type: _FunctionType
    function: FunctionTool


class CalledFunction(StrictBody):
    name: ToolName
    arguments: ArgumentsText


class ChatCall(StrictBody):
    """A tool call of an earlier answer."""

    id: str
    type: _FunctionType = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return call_for_template(self.id, self.function.name, self.function.arguments)


class ChosenFunction(StrictBody):
    name: ToolName


class ChosenTool(StrictBody):
    type: _FunctionType
    function: ChosenFunction


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Tool choice of a request. `mode` is one of CHOICES. `name` is the required tool, if the request names one."""

    mode: str
    name: str | None = None


def _as_choice(value: Any) -> ToolChoice:
    if value in CHOICES:
        return ToolChoice(value)
    if not isinstance(value, dict):
        raise refuse(_CHOICE_FORMS)
    return ToolChoice("required", ChosenTool.model_validate(value).function.name)


ChatTools = Annotated[
    list[ChatTool],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    few_tools,
    needs_tools,
    differing(lambda tool: tool.function.name),
]
ChatCalls = Annotated[list[ChatCall], Field(fail_fast=True, max_length=MAX_TOOLS)]
ChatChoice = Annotated[
    ToolChoice, PlainValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | ChosenTool)
]
NEEDS_TOOLS = needs_tools({"anyOf": [{"const": "required"}, {"type": "object"}]})  # for both OpenAI APIs


def check_choice(choice: ToolChoice | None, tools: Sequence[ChatTool] | None) -> None:
    """Raise a validator's error if `tools` do not allow the choice."""
    if choice is not None and choice.mode == "required":
        require_among([tool.function.name for tool in tools or ()], choice.name)


def offer_of(
    tools: Sequence[ChatTool] | None, choice: ToolChoice | None = None, *, parallel: bool = True
) -> ToolOffer | None:
    """Return the tools that the model may call, or None."""
    return offer_of_functions([tool.function for tool in tools or ()], choice, parallel=parallel)


def offer_of_functions(
    functions: Sequence[FunctionTool], choice: ToolChoice | None, *, parallel: bool
) -> ToolOffer | None:
    """Return the tools that the model may call, given as bare functions, or None."""
    if not functions or (choice is not None and choice.mode == "none"):
        return None
    told = [
        tool_of(function.name, function.description, function.parameters, strict=function.strict)
        for function in functions
    ]
    if choice is None:
        return ToolOffer(tuple(told), parallel=parallel)
    return ToolOffer(tuple(told), choice.mode == "required", choice.name, parallel)

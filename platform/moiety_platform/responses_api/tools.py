"""Tools and tool choice in OpenAI's fields for responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, field_validator

from moiety_platform.inference.body_fields import StrictBody, refuse, shows
from moiety_platform.inference.tool_fields import (
    MAX_TOOLS,
    ToolName,
    differing,
    few_tools,
    require_among,
)
from moiety_platform.openai_api.tools import CHOICES, FunctionTool, ToolChoice

_FUNCTION = "function"
_FORMS = 'it must be \'none\', \'auto\', \'required\' or {"type": "function", "name": "…"}'


class ResponseTool(FunctionTool):
    """A function that the client provides."""

    type: Annotated[str, shows(enum=[_FUNCTION])]

    @field_validator("type")
    @classmethod
    def _only_functions(cls, value: str) -> str:
        if value != _FUNCTION:
            raise refuse(f"tools of type {value[:64]!r} are not supported; send functions, and call them yourself")
        return value

    def fields(self) -> dict[str, Any]:
        """Return the tool as the answer repeats it."""
        return {
            "type": _FUNCTION,
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


class ChosenResponseTool(StrictBody):
    type: Literal["function"]
    name: ToolName


def _as_choice(value: Any) -> ToolChoice:
    if value in CHOICES:
        return ToolChoice(value)
    if not isinstance(value, dict) or value.get("type") != _FUNCTION:
        raise refuse(_FORMS)
    return ToolChoice("required", ChosenResponseTool.model_validate(value).name)


ResponseTools = Annotated[
    list[ResponseTool],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    few_tools,
    differing(lambda tool: tool.name),
]
ResponseChoice = Annotated[
    ToolChoice,
    PlainValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | ChosenResponseTool),
]


def check_choice(choice: ToolChoice | None, tools: Sequence[ResponseTool] | None) -> None:
    """Raise a validator's error if `tools` do not allow the choice."""
    if choice is not None and choice.mode == "required":
        require_among([tool.name for tool in tools or ()], choice.name)


def choice_fields(choice: ToolChoice | None) -> str | dict[str, str]:
    """Return the tool choice as the answer repeats it."""
    if choice is None:
        return "auto"
    return choice.mode if choice.name is None else {"type": _FUNCTION, "name": choice.name}

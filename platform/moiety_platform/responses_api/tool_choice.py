"""Tool choice in OpenAI's fields for responses, and the tools that it leaves to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StringConstraints, ValidationInfo

from moiety_platform.inference.body_fields import StrictBody, refuse
from moiety_platform.inference.tool_fields import MAX_TOOLS, ToolName, few_tools
from moiety_platform.inference.typed_values import as_named_type, named_type
from moiety_platform.responses_api.calls import OfferedTool, name_for_model
from moiety_platform.responses_api.tools import readable_type
from moiety_text.tools.offer import ToolOffer

MODES = ("none", "auto", "required")
_Name = Annotated[str, StringConstraints(min_length=1, max_length=257)]  # of a namespace and a tool in it
_FORMS = (
    "it must be 'none', 'auto', 'required', {\"type\": \"allowed_tools\", …} or an object with the 'type' of a tool, "
    "and with its 'name' where the type is 'function' or 'custom'"
)


class NamedToolChoice(StrictBody):
    """A function or custom tool. One of a namespace has it beside its name, or in front of it with a dot."""

    type: Literal["function", "custom"]
    name: _Name
    namespace: ToolName | None = None

    def matches(self, tool: OfferedTool) -> bool:
        return tool.kind == self.type and tool.tool.name == name_for_model(self.name, self.namespace)


class TypedToolChoice(StrictBody):
    """The tool of a type that has only one."""

    type: Literal["apply_patch", "shell", "local_shell", "tool_search"]

    def matches(self, tool: OfferedTool) -> bool:
        return tool.kind == self.type


class OtherToolChoice(StrictBody):
    """A tool that is not offered, such as a hosted one."""

    type: str

    def matches(self, tool: OfferedTool) -> bool:
        return False


OneTool = NamedToolChoice | TypedToolChoice | OtherToolChoice
_TYPES: Mapping[str, type[OneTool]] = MappingProxyType(
    {
        "function": NamedToolChoice,
        "custom": NamedToolChoice,
        "apply_patch": TypedToolChoice,
        "shell": TypedToolChoice,
        "local_shell": TypedToolChoice,
        "tool_search": TypedToolChoice,
    }
)


class AllowedToolChoice(StrictBody):
    """The tools that may be called among those of the request."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[Annotated[OneTool, named_type(_TYPES, OtherToolChoice, OneTool)]],
        Field(fail_fast=True, max_length=MAX_TOOLS),
        few_tools,
    ]


@dataclass(frozen=True, slots=True)
class ResponseToolChoice:
    """Tool choice of a request.

    `mode` is one of MODES. `allowed` are the tools that may be called, None for all of them. `fields` is the choice as
    the answer repeats it.
    """

    mode: str = "auto"
    allowed: Sequence[OneTool] | None = None
    is_forced: bool = False  # the only tool in `allowed` must be called once
    fields: Any = "auto"

    def offer(self, offered: Sequence[OfferedTool], *, parallel: bool) -> ToolOffer | None:
        """Return the tools that the model may call, or None."""
        callable_tools = tuple(tool.tool for tool in self.callable(offered))
        if not callable_tools:
            return None
        if self.is_forced:
            forced = callable_tools[0].name
            return ToolOffer(tuple(tool.tool for tool in offered), must_call=True, forced=forced, parallel=parallel)
        return ToolOffer(callable_tools, must_call=self.mode == "required", parallel=parallel)

    def callable(self, offered: Sequence[OfferedTool]) -> list[OfferedTool]:
        """Return those of the offered tools that may be called."""
        if self.mode == "none":
            return []
        if self.allowed is None:
            return list(offered)
        return [tool for tool in offered if any(map(_matcher(tool), self.allowed))]

    def check(self, offered: Sequence[OfferedTool]) -> None:
        """Raise a validator's error if a call is required and there is no such tool."""
        if self.mode != "required" or self.callable(offered):
            return
        if not offered:
            raise refuse("there are no tools to choose from that a client executes; send 'tools' as well")
        if self.is_forced and isinstance(self.allowed, tuple) and isinstance(self.allowed[0], NamedToolChoice):
            raise refuse(f"none of the tools has the name {self.allowed[0].name!r}")
        kinds = sorted({readable_type(one.type) for one in self.allowed or ()})
        raise refuse(
            f"none of the tools that it allows can be called (types: {', '.join(kinds)[:200]}). Tools that OpenAI's "
            "servers run are not available here; choose another one, or 'auto'"
        )


AUTO = ResponseToolChoice()


def _matcher(tool: OfferedTool) -> Callable[[OneTool], bool]:
    return lambda one: one.matches(tool)


def _as_choice(value: Any, info: ValidationInfo) -> ResponseToolChoice:
    if isinstance(value, str) and value in MODES:
        return ResponseToolChoice(value, fields=value)
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise refuse(_FORMS)
    if value["type"] == "allowed_tools":
        allowed = AllowedToolChoice.model_validate(value, context=info.context)
        tools = [one.model_dump(mode="json", exclude_none=True) for one in allowed.tools]
        fields = {"type": allowed.type, "mode": allowed.mode, "tools": tools}
        return ResponseToolChoice(allowed.mode, tuple(allowed.tools), fields=fields)
    one = as_named_type(value, info, _TYPES, OtherToolChoice)
    return ResponseToolChoice("required", (one,), is_forced=True, fields=one.model_dump(mode="json", exclude_none=True))


ResponseChoice = Annotated[
    ResponseToolChoice,
    PlainValidator(
        _as_choice,
        json_schema_input_type=Literal["none", "auto", "required"]
        | AllowedToolChoice
        | NamedToolChoice
        | TypedToolChoice,
    ),
]

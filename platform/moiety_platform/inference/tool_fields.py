"""Tool fields of all APIs' request bodies, with their limits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import AfterValidator, BeforeValidator, ValidationInfo

from moiety_platform.errors import BadRequest
from moiety_platform.inference.body_fields import bounded, refuse, shape_of, shows
from moiety_platform.json_depth import check_depth
from moiety_text.tools.history import parsed_arguments
from moiety_text.tools.json_scanner import MAX_DEPTH
from moiety_text.tools.offer import Tool

MAX_TOOLS = 1024  # upper bound of the setting
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

Named = TypeVar("Named")


def _check_name(value: str) -> str:
    if _NAME.fullmatch(value) is None:
        raise refuse(
            f"{value[:64]!r} is not a valid name of a tool: use 1 to 128 ASCII letters, digits and any of '_.:/-'"
        )
    return value


def _check_nesting(data: bytes) -> None:
    try:
        check_depth(data, MAX_DEPTH)
    except BadRequest as exc:
        raise refuse(exc.message) from exc


def _check_schema(value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    data, most = msgspec.json.encode(value), shape_of(info).max_tool_schema_bytes
    if len(data) > most:
        raise refuse(f"it has {len(data):,} bytes as JSON; it may have {most:,}")
    _check_nesting(data)
    return value


def _check_variables(value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Return chat template variables without null values, which mean the template's default.

    The best-known switch, `enable_thinking`, is a boolean in every template.
    """
    value = {name: one for name, one in value.items() if one is not None}
    if not isinstance(value.get("enable_thinking", True), bool):
        raise refuse("'enable_thinking' must be true or false")
    return _check_schema(value, info)


def _check_object(value: dict[str, Any]) -> dict[str, Any]:
    _check_nesting(msgspec.json.encode(value))
    return value


def _parse_arguments(value: Any) -> Any:
    """Parse a call's arguments, an object in a string; a string that holds no object stays text."""
    if not isinstance(value, str):
        raise refuse("it must be a string, such as that of a call that was returned")
    _check_nesting(value.encode(errors="replace"))
    return parsed_arguments(value)


def refuse_equal_names(names: Sequence[str]) -> None:
    """Raise a validator's error if two tools have the same name."""
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise refuse(f"two tools have the name {twice!r}; give each its own")


def differing(name_of: Callable[[Named], str]) -> AfterValidator:
    """Return a validator that requires unique tool names in a list of tools."""

    def check(value: list[Named]) -> list[Named]:
        refuse_equal_names([name_of(tool) for tool in value])
        return value

    return AfterValidator(check)


def require_among(names: Sequence[str], name: str | None, field: str = "tools") -> None:
    """Check a tool choice that requires a call: there must be tools, and one named `name` if given.

    `field` is the request's field of the tools. Raises a validator's error.
    """
    if not names:
        raise refuse(f"there are no tools to choose from; send '{field}' as well")
    if name is not None and name not in names:
        raise refuse(f"none of the tools has the name {name!r}")


def needs_tools(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that requires tools for a `tool_choice` of that form."""
    return {
        "if": {"required": ["tool_choice"], "properties": {"tool_choice": choice}},
        "then": {"required": ["tools"], "properties": {"tools": {"type": "array", "minItems": 1}}},
    }


few_tools = bounded(lambda shape: shape.max_tools)

ToolName = Annotated[str, AfterValidator(_check_name), shows(pattern=f"^{_NAME.pattern}$")]
ToolSchema = Annotated[dict[str, Any], AfterValidator(_check_schema)]
TemplateVariables = Annotated[dict[str, Any], AfterValidator(_check_variables)]
ArgumentsObject = Annotated[dict[str, Any], AfterValidator(_check_object)]
ArgumentsText = Annotated[
    dict[str, Any] | str,
    BeforeValidator(
        _parse_arguments, json_schema_input_type=Annotated[str, shows(contentMediaType="application/json")]
    ),
]


def tool_of(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None = None
) -> Tool:
    """Return the tool for the model. A missing description becomes empty, since templates need one."""
    return Tool(name, description or "", dict(NO_PARAMETERS) if parameters is None else parameters, bool(strict))


def call_for_template(call_id: str, name: str, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return a tool call of an earlier answer in the format of chat templates.

    Arguments that are no JSON object are a text, which `ToolFormat.adapted` fits to the template.
    """
    copied = arguments if isinstance(arguments, str) else dict(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": copied}}


def arguments_text(arguments: Mapping[str, Any] | str) -> str:
    """Return the arguments of an earlier call as clients send them."""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()

"""Tools of the Responses API as functions of the model, and the model's calls as items of that API.

The model calls functions with a JSON object. OpenAI's API has other forms for some tools: custom tools take free text,
and `apply_patch`, `shell`, `local_shell` and a client's `tool_search` have items of their own. A tool of a namespace is
called by both names with a dot between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec

from moiety_platform.inference.custom_tools import arguments_of, input_of
from moiety_platform.responses_api.items import (
    CALL,
    CUSTOM_CALL,
    LOCAL_SHELL_CALL,
    PATCH_CALL,
    SEARCH_CALL,
    SHELL_CALL,
    Item,
    call_item,
    custom_call_item,
)
from moiety_text.tools.history import parsed_arguments
from moiety_text.tools.offer import Tool

Arguments = Mapping[str, Any]

PATCH_KINDS = ("create_file", "update_file", "delete_file")
MAX_INT = 2**53


class ToolKind(StrEnum):
    """Types of tools whose calls the client executes."""

    FUNCTION = "function"
    CUSTOM = "custom"
    APPLY_PATCH = "apply_patch"
    SHELL = "shell"
    LOCAL_SHELL = "local_shell"
    TOOL_SEARCH = "tool_search"


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool as the model sees it, and as the client names it."""

    kind: ToolKind
    tool: Tool
    name: str
    namespace: str | None = None


def name_for_model(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_NUMBER = {"type": "integer", "minimum": 1}

BUILT_IN: Mapping[ToolKind, Tool] = MappingProxyType(
    {
        ToolKind.APPLY_PATCH: Tool(
            "apply_patch",
            "Create, update or delete one file. `diff` is a V4A diff without file headers: of a new file every line "
            "begins with '+'; of an update each hunk begins with '@@' and has lines that begin with ' ', '-' or '+'. "
            "To delete a file, leave `diff` out.",
            _object({"type": {"type": "string", "enum": list(PATCH_KINDS)}, "path": _TEXT, "diff": _TEXT},
                    "type", "path"),
        ),
        ToolKind.SHELL: Tool(
            "shell",
            "Run commands in a shell, one after another, and return the output and exit code of each.",
            _object({"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}, "commands"),
        ),
        ToolKind.LOCAL_SHELL: Tool(
            "local_shell",
            "Run one command, given as the list of the program and its arguments, and return its output.",
            _object({"command": _TEXTS, "timeout_ms": _NUMBER, "working_directory": _TEXT,
                     "env": {"type": "object", "additionalProperties": _TEXT}}, "command"),
        ),
    }
)  # fmt: skip
"""Functions for tools that the API defines."""


def call_item_of(offered: OfferedTool, call_id: str, arguments: str) -> Item | None:
    """Return a complete call of the model as an item, or None if the tool cannot be called with these arguments."""
    match offered.kind:
        case ToolKind.FUNCTION:
            return call_item(call_id, offered.name, arguments, offered.namespace)
        case ToolKind.CUSTOM:
            return custom_call_item(call_id, offered.name, input_of(arguments), offered.namespace)
    fields = _FIELDS_OF[offered.kind](msgspec.json.decode(arguments))
    return None if fields is None else {"status": "completed", "call_id": call_id, **fields}


def call_for_model(item: Item) -> tuple[str, Arguments | str]:
    """Return the name and the arguments with which the model has made a call: a text where they are no object."""
    match item["type"]:
        case kind if kind in (CALL, CUSTOM_CALL):
            name = name_for_model(item["name"], item.get("namespace"))
            return name, arguments_of(item["input"]) if kind == CUSTOM_CALL else parsed_arguments(item["arguments"])
        case kind if kind == PATCH_CALL:
            return ToolKind.APPLY_PATCH, item["operation"]
        case kind if kind == SEARCH_CALL:
            return ToolKind.TOOL_SEARCH, item["arguments"]
        case kind:
            name = ToolKind.SHELL if kind == SHELL_CALL else ToolKind.LOCAL_SHELL
            return name, {key: value for key, value in item["action"].items() if value and key != "type"}


def _patch_fields(arguments: Arguments) -> Item | None:
    kind, path, diff = arguments.get("type"), arguments.get("path"), arguments.get("diff")
    if kind not in PATCH_KINDS or not isinstance(path, str) or not path:
        return None
    operation = {"type": kind, "path": path}
    if kind != "delete_file":
        if not isinstance(diff, str):
            return None
        operation["diff"] = diff
    return {"type": PATCH_CALL, "operation": operation}


def _shell_fields(arguments: Arguments) -> Item | None:
    commands = _as_texts(arguments.get("commands"))
    if not commands:
        return None
    limits = {name: _as_number(arguments.get(name)) for name in ("timeout_ms", "max_output_length")}
    return {"type": SHELL_CALL, "action": {"commands": commands, **limits}, "environment": {"type": "local"}}


def _local_shell_fields(arguments: Arguments) -> Item | None:
    command, env = _as_texts(arguments.get("command")), arguments.get("env")
    if not command:
        return None
    action = {
        "type": "exec",
        "command": command,
        "env": {key: value for key, value in env.items() if isinstance(value, str)} if isinstance(env, dict) else {},
        "timeout_ms": _as_number(arguments.get("timeout_ms")),
        "user": None,
        "working_directory": _as_text(arguments.get("working_directory")),
    }
    return {"type": LOCAL_SHELL_CALL, "action": action}


def _search_fields(arguments: Arguments) -> Item:
    return {"type": SEARCH_CALL, "execution": "client", "arguments": dict(arguments)}


_FIELDS_OF: Mapping[ToolKind, Callable[[Arguments], Item | None]] = MappingProxyType(
    {
        ToolKind.APPLY_PATCH: _patch_fields,
        ToolKind.SHELL: _shell_fields,
        ToolKind.LOCAL_SHELL: _local_shell_fields,
        ToolKind.TOOL_SEARCH: _search_fields,
    }
)


def _as_texts(value: Any) -> list[str] | None:
    """Return a list of strings. A model may give a single one without the list."""
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) and all(isinstance(one, str) for one in value) else None


def _as_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _as_number(value: Any) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_INT
    return value if is_number else None

"""Tools that Anthropic defines and clients execute, as functions with their published parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ClientTool:
    """Description and parameters of a tool that the client executes."""

    description: str
    parameters: Mapping[str, Any]


def _text(description: str) -> dict[str, str]:
    return {"type": "string", "description": description}


def _commands(names: list[str], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": names, "description": "Command to run."}, **more},
        "required": ["command"],
    }


_PATH = _text("Absolute path of the file or directory.")
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "First and last line for `view`, from 1; -1 as the last one means the end of the file.",
}
_EDITS = {
    "file_text": _text("Content of the new file, for `create`."),
    "old_str": _text("Text to replace, for `str_replace`. It must occur in the file exactly once."),
    "new_str": _text("Text that replaces it, for `str_replace`."),
    "insert_line": {
        "type": "integer",
        "description": "Line after which text is inserted, for `insert`; 0 is the beginning.",
    },
    "insert_text": _text("Text to insert, for `insert`."),
}
_EARLIER_EDITS = {name: _EDITS[name] for name in ("file_text", "old_str", "new_str", "insert_line")} | {
    "new_str": _text("Text that replaces it, for `str_replace`, or text to insert, for `insert`."),
}
_EDITOR = (
    "Views, creates and edits files. `view` shows a file with line numbers, or lists a directory. `create` writes a "
    "new file. `str_replace` replaces one text. `insert` inserts text after a line."
)

BASH = ClientTool(
    "Runs commands in a persistent bash session, and returns what they print. Commands cannot ask for input.",
    {
        "type": "object",
        "properties": {
            "command": _text("Command to run. Required unless the session is restarted."),
            "restart": {"type": "boolean", "description": "Whether to restart the session."},
        },
    },
)
EARLIER_TEXT_EDITOR = ClientTool(
    _EDITOR + " `undo_edit` undoes the last edit of a file.",
    {
        **_commands(
            ["view", "create", "str_replace", "insert", "undo_edit"],
            path=_PATH,
            **_EARLIER_EDITS,
            view_range=_RANGE,
        ),
        "required": ["command", "path"],
    },
)
TEXT_EDITOR = ClientTool(
    _EDITOR,
    {
        **_commands(
            ["view", "create", "str_replace", "insert"],
            path=_PATH,
            **_EDITS,
            view_range=_RANGE,
        ),
        "required": ["command", "path"],
    },
)
MEMORY = ClientTool(
    "Keeps notes in files under `/memories`, which outlive the conversation. Look there before a task, and write down "
    "what later conversations need. `view` shows a file or lists a directory. `create`, `str_replace`, `insert`, "
    "`delete` and `rename` change files.",
    _commands(
        ["view", "create", "str_replace", "insert", "delete", "rename"],
        path=_text("Path under `/memories`, for all commands but `rename`."),
        view_range=_RANGE,
        **_EDITS,
        old_path=_text("Present path, for `rename`."),
        new_path=_text("New path, for `rename`."),
    ),
)

CLIENT_TOOLS: Mapping[str, ClientTool] = {
    "bash_20241022": BASH,
    "bash_20250124": BASH,
    "memory_20250818": MEMORY,
    "text_editor_20241022": EARLIER_TEXT_EDITOR,
    "text_editor_20250124": EARLIER_TEXT_EDITOR,
    "text_editor_20250429": TEXT_EDITOR,
    "text_editor_20250728": TEXT_EDITOR,
}
"""Tools by type."""

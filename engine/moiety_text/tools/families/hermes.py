"""Calls of Hermes, Qwen 2.5 and 3, Granite 4 and Ernie 4.5: a JSON object between two tags."""

from __future__ import annotations

from moiety_text.tools.formats import ToolFamily, ToolFormat
from moiety_text.tools.reader import CallReader


class HermesReader(CallReader):
    """Reader of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the format of Hermes and Qwen."""

    opener = "<tool_call>"
    closer = "</tool_call>"


def _format_of(template: str) -> ToolFormat:
    return ToolFormat(
        HermesReader,
        ("<tool_call>", "</tool_call>"),
        to_name='<tool_call>\n{"name": "',
        to_arguments='", "arguments":',
        to_end="}\n</tool_call>",
    )


HERMES = ToolFamily("hermes", lambda template: "<tool_call>" in template, _format_of)

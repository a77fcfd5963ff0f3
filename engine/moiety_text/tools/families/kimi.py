"""Calls of Kimi K2: an id with the tool's name and a number, and a JSON object, between special tokens."""

from __future__ import annotations

import re

from moiety_text.tools.formats import ToolFamily, ToolFormat
from moiety_text.tools.history import CallIds
from moiety_text.tools.named import NamedReader

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_NUMBERED = re.compile(r"(?:functions\.)?(.+):[0-9]{1,9}")


class KimiReader(NamedReader):
    """Reader of `functions.NAME:0<|tool_call_argument_begin|>{…}` in a section of calls."""

    opener = _SECTION
    closer = _SECTION_END
    call_opener = _CALL
    name_end = _ARGUMENTS
    call_end = _CALL_END

    def _tool_name(self, name: str) -> str:
        found = _NUMBERED.fullmatch(name)
        return name if found is None else found[1]


def _format_of(template: str) -> ToolFormat:
    return ToolFormat(
        KimiReader,
        (_SECTION, _SECTION_END, _CALL, _CALL_END, _ARGUMENTS),
        to_name=f"{_SECTION}{_CALL}functions.",
        to_arguments=_ARGUMENTS,
        to_end=_CALL_END,
        between=f"{_CALL}functions.",
        closer=_SECTION_END,
        name_end=":0",
        name_end_pattern=":[0-9]{1,6}",
        call_ids=CallIds.NUMBERED,
    )


KIMI_K2 = ToolFamily("kimi_k2", lambda template: _SECTION in template, _format_of)

"""Calls of DeepSeek V3, R1 and V3.1: a name and a JSON object between special tokens."""

from __future__ import annotations

from moiety_text.tools.formats import ToolFamily, ToolFormat
from moiety_text.tools.named import NamedReader
from moiety_text.tools.scanning import SPACE

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_MARKERS = (_SECTION, _SECTION_END, _CALL, _CALL_END, _SEPARATOR)


class DeepSeekV31Reader(NamedReader):
    """Reader of `NAME<｜tool▁sep｜>{…}` in a section of calls."""

    opener = _SECTION
    closer = _SECTION_END
    call_opener = _CALL
    name_end = _SEPARATOR
    call_end = _CALL_END


class DeepSeekV3Reader(DeepSeekV31Reader):
    """Reader of `function<｜tool▁sep｜>NAME` and arguments in a fenced block of JSON, in a section of calls."""

    name_end = "```json"
    object_end = "```"

    def _tool_name(self, name: str) -> str:
        return name.removeprefix("function").removeprefix(_SEPARATOR).strip(SPACE)


def _v3_format_of(template: str) -> ToolFormat:
    to_call = f"{_CALL}function{_SEPARATOR}"
    return ToolFormat(
        DeepSeekV3Reader,
        _MARKERS,
        to_name=_SECTION + to_call,
        to_arguments="\n```json\n",
        to_end=f"\n```{_CALL_END}",
        between=f"\n{to_call}",
        closer=_SECTION_END,
    )


def _v31_format_of(template: str) -> ToolFormat:
    return ToolFormat(
        DeepSeekV31Reader,
        _MARKERS,
        to_name=_SECTION + _CALL,
        to_arguments=_SEPARATOR,
        to_end=_CALL_END,
        between=_CALL,
        closer=_SECTION_END,
    )


DEEPSEEK_V3 = ToolFamily("deepseek_v3", lambda template: _SECTION in template and "```json" in template, _v3_format_of)
DEEPSEEK_V31 = ToolFamily("deepseek_v31", lambda template: _SECTION in template, _v31_format_of)

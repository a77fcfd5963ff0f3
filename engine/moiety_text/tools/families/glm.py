"""Calls of GLM-4.5 to GLM-5 and of Hunyuan 3: a name, then a tag for each key and each value."""

from __future__ import annotations

import re
from collections.abc import Generator

from moiety_text.tools.formats import ParameterTags, ToolFamily, ToolFormat
from moiety_text.tools.json_scanner import Malformed
from moiety_text.tools.scanning import MAX_NAME_CHARS, SPACE, CallCharacters
from moiety_text.tools.tagged import TaggedReader

_ON_LINES = re.compile(r"</arg_key>(?:\\n|\n)<arg_value>")
_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class GlmReader(TaggedReader):
    """Reader of `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`."""

    opener = "<tool_call>"
    key_opener = "<arg_key>"
    key_end = "</arg_key>"
    value_opener = "<arg_value>"
    value_end = "</arg_value>"
    call_end = "</tool_call>"

    def _take_tool_name(self, text: CallCharacters) -> Generator[None, str, str]:
        name = ""
        while (character := (yield from text.take())) != "<":
            name += character
            if len(name) > MAX_NAME_CHARS:
                raise Malformed
        text.put_back(character)
        return name.strip(SPACE)


class HunyuanReader(TaggedReader):
    """Reader of `<tool_calls><tool_call>NAME<tool_sep><arg_key>K</arg_key>…</tool_call>…</tool_calls>`."""

    opener = "<tool_calls>"
    closer = "</tool_calls>"
    call_opener = "<tool_call>"
    name_end = "<tool_sep>"
    key_opener = "<arg_key>"
    key_end = "</arg_key>"
    value_opener = "<arg_value>"
    value_end = "</arg_value>"
    call_end = "</tool_call>"


def _parameters(between_lines: str) -> ParameterTags:
    to_value = f"</arg_key>{between_lines}<arg_value>"
    return ParameterTags("<arg_key>", to_value, to_value, "</arg_value>", between=between_lines)


def _format_of(template: str) -> ToolFormat:
    line = "\n" if _ON_LINES.search(template) else ""
    return ToolFormat(
        GlmReader,
        ("<tool_call>", "</tool_call>", *_TAGS),
        to_name="<tool_call>",
        to_arguments=line,
        to_end="</tool_call>",
        parameters=_parameters(line),
    )


def _hunyuan_format_of(template: str) -> ToolFormat:
    return ToolFormat(
        HunyuanReader,
        ("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>", *_TAGS),
        to_name="<tool_calls>\n<tool_call>",
        to_arguments="<tool_sep>\n",
        to_end="</tool_call>",
        between="\n<tool_call>",
        closer="\n</tool_calls>",
        parameters=_parameters("\n"),
    )


GLM = ToolFamily("glm45", lambda template: "<tool_call>" in template and "<arg_key>" in template, _format_of)
HUNYUAN = ToolFamily("hy_v3", lambda template: "<tool_sep>" in template and "<arg_key>" in template, _hunyuan_format_of)

"""Calls of Qwen3-Coder, Qwen 3.5, Step 3.5, Nemotron 3, MiMo and Seed-OSS: tags with names after an equals sign."""

from __future__ import annotations

import re

from moiety_text.tools.formats import ToolFamily
from moiety_text.tools.tagged import TaggedReader

_PADDED = re.compile(r"<parameter=\w+>(?:\\n|\n)")  # in the example of the template


class QwenCoderReader(TaggedReader):
    """Reader of `<tool_call><function=NAME><parameter=P>value</parameter></function></tool_call>`.

    A line break before and after each value belongs to the tags.
    """

    opener = "<tool_call>"
    closer = "</tool_call>"
    call_opener = "<function="
    name_end = ">"
    key_opener = "<parameter="
    key_end = ">"
    value_end = "</parameter>"
    call_end = "</function>"
    padding = "\n"


class MimoReader(QwenCoderReader):
    """Reader of the same format without line breaks around values."""

    padding = ""


class SeedReader(MimoReader):
    """Reader of the same format between `<seed:tool_call>` and `</seed:tool_call>`."""

    opener = "<seed:tool_call>"
    closer = "</seed:tool_call>"


def _is_of(template: str) -> bool:
    return "<tool_call>" in template and "<function=" in template and "<parameter=" in template


QWEN3_CODER = ToolFamily(
    "qwen3_coder",
    lambda template: _is_of(template) and _PADDED.search(template) is not None,
    lambda template: QwenCoderReader.tool_format(shares_section=False),
)
MIMO = ToolFamily("mimo", _is_of, lambda template: MimoReader.tool_format(shares_section=False))
SEED_OSS = ToolFamily(
    "seed_oss",
    lambda template: "<seed:tool_call>" in template,
    lambda template: SeedReader.tool_format(shares_section=False),
)

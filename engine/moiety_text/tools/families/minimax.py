"""Calls of MiniMax M2 and of dots: `<invoke name="…">` with a tag for each parameter."""

from __future__ import annotations

from moiety_text.tools.formats import ToolFamily
from moiety_text.tools.tagged import TaggedReader


class MinimaxReader(TaggedReader):
    """Reader of `<minimax:tool_call><invoke name="NAME"><parameter name="P">value</parameter></invoke>…`."""

    opener = "<minimax:tool_call>"
    closer = "</minimax:tool_call>"
    call_opener = '<invoke name="'
    name_end = '">'
    key_opener = '<parameter name="'
    key_end = '">'
    value_end = "</parameter>"
    call_end = "</invoke>"


class DotsReader(MinimaxReader):
    """Reader of the same calls between `<dots_function_call>` and `</dots_function_call>`."""

    opener = "<dots_function_call>"
    closer = "</dots_function_call>"


MINIMAX_M2 = ToolFamily(
    "minimax_m2",
    lambda template: "<minimax:tool_call>" in template,
    lambda template: MinimaxReader.tool_format(shares_section=True),
)
DOTS = ToolFamily(
    "dots",
    lambda template: "<dots_function_call>" in template,
    lambda template: DotsReader.tool_format(shares_section=True),
)

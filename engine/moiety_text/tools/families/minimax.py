"""Calls of MiniMax M2 and of dots: `<invoke name="…">` with a tag for each parameter."""

from __future__ import annotations

from moiety_text.tools.formats import ParameterTags, ToolFamily, ToolFormat
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


def _new_format(reader: type[MinimaxReader]) -> ToolFormat:
    return ToolFormat(
        reader,
        (reader.opener, reader.closer),
        to_name=f'{reader.opener}\n<invoke name="',
        to_arguments='">\n',
        to_end="</invoke>\n",
        between='<invoke name="',
        closer=reader.closer,
        parameters=ParameterTags('<parameter name="', '">', '">', "</parameter>", between="\n"),
    )


MINIMAX_M2 = ToolFamily(
    "minimax_m2", lambda template: "<minimax:tool_call>" in template, lambda template: _new_format(MinimaxReader)
)
DOTS = ToolFamily("dots", lambda template: "<dots_function_call>" in template, lambda template: _new_format(DotsReader))

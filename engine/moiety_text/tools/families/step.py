"""Calls of Step 3: `steptml` elements between special tokens."""

from __future__ import annotations

from moiety_text.tools.formats import ParameterTags, ToolFamily, ToolFormat
from moiety_text.tools.tagged import TaggedReader

_SECTION, _SECTION_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"
_INVOKE = f'{_CALL}function{_SEPARATOR}<steptml:invoke name="'


class StepReader(TaggedReader):
    """Reader of `<steptml:invoke name="NAME"><steptml:parameter name="P">value</steptml:parameter>…`."""

    opener = _SECTION
    closer = _SECTION_END
    call_opener = _INVOKE
    name_end = '">'
    key_opener = '<steptml:parameter name="'
    key_end = '">'
    value_end = "</steptml:parameter>"
    call_end = f"</steptml:invoke>{_CALL_END}"


def _format_of(template: str) -> ToolFormat:
    return ToolFormat(
        StepReader,
        (_SECTION, _SECTION_END, _CALL, _CALL_END, _SEPARATOR),
        to_name=f"{_SECTION}\n{_INVOKE}",
        to_arguments='">\n',
        to_end=StepReader.call_end,
        between=f"\n{_INVOKE}",
        closer=f"\n{_SECTION_END}",
        parameters=ParameterTags(StepReader.key_opener, '">', '">', StepReader.value_end, between="\n"),
    )


STEP3 = ToolFamily("step3", lambda template: "<steptml:invoke" in template, _format_of)

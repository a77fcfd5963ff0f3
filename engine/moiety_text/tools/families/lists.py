"""Calls in a JSON list after a marker: Granite 3, Hunyuan A13B, Jamba, Nemotron, Phi-4-mini and Cohere Command."""

from __future__ import annotations

from moiety_text.tools.formats import ToolFamily, ToolFormat
from moiety_text.tools.lists import ListReader, StartListReader


class GraniteReader(ListReader):
    """Reader of `<|tool_call|>[{"name": …, "arguments": {…}}, …]`."""

    opener = "<|tool_call|>"


class PhiReader(GraniteReader):
    """Reader of `<|tool_call|>[…]<|/tool_call|>`, also around a single object."""

    closer = "<|/tool_call|>"


class PhiFunctoolsReader(ListReader):
    """Reader of `functools[{"name": …, "arguments": {…}}, …]`."""

    opener = "functools"


class HunyuanListReader(ListReader):
    """Reader of `<tool_calls>[{"name": …, "arguments": {…}}, …]</tool_calls>`."""

    opener = "<tool_calls>"
    closer = "</tool_calls>"


class NemotronReader(ListReader):
    """Reader of `<TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>`."""

    opener = "<TOOLCALL>"
    closer = "</TOOLCALL>"


class CohereReader(ListReader):
    """Reader of `<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}, …]<|END_ACTION|>`."""

    opener = "<|START_ACTION|>"
    closer = "<|END_ACTION|>"


def _new_format(reader: type[ListReader], *, marks_calls: bool = True) -> ToolFormat:
    opener = reader.opener if marks_calls else ""
    return ToolFormat(
        reader,
        tuple(tag for tag in (opener, reader.closer) if tag),
        to_name=opener + '[{"name": "',
        to_arguments='", "arguments":',
        to_end="}",
        between=', {"name": "',
        closer="]" + reader.closer,
        marks_calls=marks_calls,
    )


def _cohere_format_of(template: str) -> ToolFormat:
    item = '{"tool_call_id": "0", "tool_name": "'
    return ToolFormat(
        CohereReader,
        (CohereReader.opener, CohereReader.closer),
        to_name=f"{CohereReader.opener}[\n    {item}",
        to_arguments='", "parameters":',
        to_end="}",
        between=f",\n    {item}",
        closer="\n]" + CohereReader.closer,
    )


GRANITE = ToolFamily(
    "granite", lambda template: "<|tool_call|>" in template, lambda template: _new_format(GraniteReader)
)
PHI4_MINI = ToolFamily(
    "phi4_mini", lambda template: "<|/tool_call|>" in template, lambda template: _new_format(PhiReader)
)
PHI4_MINI_JSON = ToolFamily(
    "phi4_mini_json", lambda template: "functools[" in template, lambda template: _new_format(PhiFunctoolsReader)
)
HUNYUAN_A13B = ToolFamily(
    "hunyuan_a13b", lambda template: "<tool_calls>" in template, lambda template: _new_format(HunyuanListReader)
)
NEMOTRON_JSON = ToolFamily(
    "nemotron_json", lambda template: "<TOOLCALL>" in template, lambda template: _new_format(NemotronReader)
)
COHERE_COMMAND = ToolFamily("cohere_command", lambda template: CohereReader.opener in template, _cohere_format_of)
JSON_LIST = ToolFamily(  # only by name: nothing in a template shows it
    "json_list", lambda template: False, lambda template: _new_format(StartListReader, marks_calls=False)
)

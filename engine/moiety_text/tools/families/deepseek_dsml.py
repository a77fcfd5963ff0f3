"""Calls of DeepSeek V3.2 and V4: DSML, whose tags contain a token and say which values are strings."""

from __future__ import annotations

from collections.abc import Generator

from moiety_text.tools.argument_types import ArgumentSchema, typed_argument
from moiety_text.tools.formats import ParameterTags, ToolFamily, ToolFormat
from moiety_text.tools.scanning import CallCharacters, expect, take_tag, take_until
from moiety_text.tools.tagged import TaggedReader, take_value_text

_TOKEN = "｜DSML｜"


class DeepSeekV32Reader(TaggedReader):
    """Reader of `<｜DSML｜invoke name="NAME">` with `<｜DSML｜parameter name="P" string="true">` in a section."""

    opener = f"<{_TOKEN}function_calls>"
    closer = f"</{_TOKEN}function_calls>"
    call_opener = f'<{_TOKEN}invoke name="'
    name_end = '"'
    key_opener = f'<{_TOKEN}parameter name="'
    key_end = '"'
    value_end = f"</{_TOKEN}parameter>"
    call_end = f"</{_TOKEN}invoke>"

    def _scan_call(self, text: CallCharacters) -> Generator[None, str, tuple[str, str]]:
        name = self._known((yield from self._take_tool_name(text)))
        if (yield from take_tag(text, (">", "/>"))) == "/>":  # without arguments, as V4 writes it
            return name, "{}"
        return name, (yield from self._take_arguments(text, name))

    def _take_value(self, text: CallCharacters, schema: ArgumentSchema, key: str) -> Generator[None, str, str]:
        yield from expect(text, ' string="')
        is_text = (yield from take_tag(text, ('true">', 'false">'))) == 'true">'
        if is_text:
            return typed_argument((yield from take_until(text, self.value_end)), frozenset(["string"]))
        value = yield from take_value_text(text, self.value_end, may_be_json=True)
        types = schema.parameter_types(key)
        return typed_argument(value, types - {"string"} or types)


class DeepSeekV4Reader(DeepSeekV32Reader):
    """Reader of the same calls in a section with another name."""

    opener = f"<{_TOKEN}tool_calls>"
    closer = f"</{_TOKEN}tool_calls>"


def _new_format(reader: type[DeepSeekV32Reader]) -> ToolFormat:
    to_value = '" string="true">'
    return ToolFormat(
        reader,
        (_TOKEN,),
        to_name=f"{reader.opener}\n{reader.call_opener}",
        to_arguments='">\n',
        to_end=reader.call_end,
        between=f"\n{reader.call_opener}",
        closer=f"\n{reader.closer}",
        parameters=ParameterTags(
            reader.key_opener, to_value, to_value.replace("true", "false"), reader.value_end, between="\n"
        ),
    )


DEEPSEEK_V4 = ToolFamily(
    "deepseek_v4",
    lambda template: _TOKEN in template and "function_calls" not in template and "tool_calls>" in template,
    lambda template: _new_format(DeepSeekV4Reader),
)
DEEPSEEK_V32 = ToolFamily(
    "deepseek_v32",
    lambda template: _TOKEN in template and "function_calls" in template,
    lambda template: _new_format(DeepSeekV32Reader),
)

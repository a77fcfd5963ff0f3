"""Base of readers whose calls have a tag for each parameter: `<parameter=NAME>value</parameter>`.

A value is the text between its tags. The schema of its tool says whether it is a string or another JSON value; a value
that is not a string and begins like a JSON object or list ends with it, so that it may contain the tags.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import ClassVar

from moiety_text.tools.argument_types import STRING, ArgumentSchema, typed_argument
from moiety_text.tools.formats import ParameterTags, ToolFormat
from moiety_text.tools.json_scanner import JsonScanner, Malformed
from moiety_text.tools.scanning import (
    MAX_NAME_CHARS,
    CallCharacters,
    expect_tag,
    take_name,
    take_past_space,
    take_tag,
    take_until,
)
from moiety_text.tools.sections import SectionReader


class TaggedReader(SectionReader):
    """Reader of `NAME` and its parameters, each with a name and a value between tags."""

    name_end: ClassVar[str]  # after the tool's name
    key_opener: ClassVar[str]  # before a parameter's name
    key_end: ClassVar[str]  # after it
    value_opener: ClassVar[str] = ""  # before the value, after white space
    value_end: ClassVar[str]
    call_end: ClassVar[str]
    padding: ClassVar[str] = ""  # one character around each value, which belongs to the tags

    @classmethod
    def tool_format(cls, *, shares_section: bool) -> ToolFormat:
        """Return the format, in which each tag stands on a line; all calls share one section, or each has its own."""
        value_begin = cls.key_end + cls.value_opener
        return ToolFormat(
            cls,
            (cls.opener, cls.closer),
            to_name=f"{cls.opener}\n{cls.call_opener}",
            to_arguments=f"{cls.name_end}\n",
            to_end=f"{cls.call_end}\n" if shares_section else f"{cls.call_end}\n{cls.closer}",
            between=cls.call_opener if shares_section else None,
            closer=cls.closer if shares_section else "",
            parameters=ParameterTags(
                cls.key_opener, value_begin, value_begin, cls.value_end, between="\n", padding=cls.padding
            ),
        )

    def _scan_call(self, text: CallCharacters) -> Generator[None, str, tuple[str, str]]:
        name = self._known((yield from self._take_tool_name(text)))
        return name, (yield from self._take_arguments(text, name))

    def _take_arguments(self, text: CallCharacters, name: str) -> Generator[None, str, str]:
        """Return the parameters before the end of the call as a JSON object."""
        schema = self._schema_of(name)
        arguments: dict[str, str] = {}
        while (yield from take_tag(text, (self.key_opener, self.call_end))) == self.key_opener:
            key = yield from take_until(text, self.key_end, MAX_NAME_CHARS)
            yield from expect_tag(text, self.value_opener)
            arguments[key] = yield from self._take_value(text, schema, key)
        return json_object_of(arguments)

    def _take_tool_name(self, text: CallCharacters) -> Generator[None, str, str]:
        return (yield from take_name(text, self.name_end))

    def _take_value(self, text: CallCharacters, schema: ArgumentSchema, key: str) -> Generator[None, str, str]:
        """Return a value as JSON, and take the tag after it."""
        types = schema.parameter_types(key)
        value = yield from take_value_text(text, self.value_end, may_be_json=STRING not in types)
        if self.padding:
            value = value.removeprefix(self.padding).removesuffix(self.padding)
        return typed_argument(value, types)


def take_value_text(text: CallCharacters, end: str, *, may_be_json: bool) -> Generator[None, str, str]:
    """Return the text before `end`, and take `end`.

    `may_be_json`: within a JSON object or list at the beginning, `end` is part of a string.
    """
    if not may_be_json:
        return (yield from take_until(text, end))
    character = yield from take_past_space(text)
    parts: list[str] = []
    if character in "{[":
        scanner = JsonScanner()
        while not scanner.is_complete:
            parts.append(character)
            try:
                scanner.advance(character)
            except Malformed:
                break
            if not scanner.is_complete:
                character = yield from text.take()
        begun = "".join(parts)
        if not scanner.is_complete and end[0] in begun:
            if end in begun:
                raise Malformed
            if begun.endswith(end[0]):  # it may be the end that breaks the value
                text.put_back(parts.pop())
    else:
        text.put_back(character)
    return "".join(parts) + (yield from take_until(text, end))


def json_object_of(arguments: Mapping[str, str]) -> str:
    """Return a JSON object of values that are JSON already."""
    members = [f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items()]
    return "{" + ", ".join(members) + "}"

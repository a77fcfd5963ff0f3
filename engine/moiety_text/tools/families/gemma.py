"""Calls of Gemma 4: a name and members without quotes, whose texts stand between special tokens."""

from __future__ import annotations

import json
from collections.abc import Generator

from moiety_text.tools.argument_types import json_of_plain
from moiety_text.tools.formats import NotedArguments, ToolFamily, ToolFormat
from moiety_text.tools.json_scanner import MAX_DEPTH, MAX_NUMBER_LENGTH, Malformed
from moiety_text.tools.scanning import (
    MAX_NAME_CHARS,
    CallCharacters,
    expect,
    expect_tag,
    take_name,
    take_past_space,
    take_until,
)
from moiety_text.tools.sections import SectionReader
from moiety_text.tools.tagged import json_object_of

_OPENER, _CLOSER, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


class GemmaReader(SectionReader):
    """Reader of `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`."""

    opener = _OPENER

    def _scan_call(self, text: CallCharacters) -> Generator[None, str, tuple[str, str]]:
        yield from expect_tag(text, "call:")
        name = self._known((yield from take_name(text, "{")))
        arguments = yield from self._take_object(text, 1)
        yield from expect_tag(text, _CLOSER)
        return name, arguments

    def _take_object(self, text: CallCharacters, depth: int) -> Generator[None, str, str]:
        """Return an object as JSON. Its opening brace has been taken."""
        members: dict[str, str] = {}
        while (character := (yield from take_past_space(text))) != "}":
            if members:
                if character != ",":
                    raise Malformed
                character = yield from take_past_space(text)
            if character == "<":
                yield from expect(text, _QUOTE[1:])
                key = yield from take_until(text, _QUOTE)
                yield from expect_tag(text, ":")
            else:
                key = character + (yield from take_until(text, ":", MAX_NAME_CHARS)) if character != ":" else ""
            members[key] = yield from self._take_value(text, depth)
        return json_object_of(members)

    def _take_list(self, text: CallCharacters, depth: int) -> Generator[None, str, str]:
        items: list[str] = []
        while (character := (yield from take_past_space(text))) != "]":
            if not items:
                text.put_back(character)
            elif character != ",":
                raise Malformed
            items.append((yield from self._take_value(text, depth)))
        return "[" + ", ".join(items) + "]"

    def _take_value(self, text: CallCharacters, depth: int) -> Generator[None, str, str]:
        if depth > MAX_DEPTH:
            raise Malformed
        character = yield from take_past_space(text)
        if character == "<":
            yield from expect(text, _QUOTE[1:])
            content = yield from take_until(text, _QUOTE)
            return json.dumps(content, ensure_ascii=False)
        if character == "{":
            return (yield from self._take_object(text, depth + 1))
        if character == "[":
            return (yield from self._take_list(text, depth + 1))
        plain = ""
        while character not in ",]}":
            plain += character
            if len(plain) > MAX_NUMBER_LENGTH:
                raise Malformed
            character = yield from text.take()
        text.put_back(character)
        plain = plain.strip()
        value = "null" if plain == "None" else json_of_plain(plain)  # the template prints null as Python does
        if value is None:
            raise Malformed
        return value


def _format_of(template: str) -> ToolFormat:
    return ToolFormat(
        GemmaReader,
        (_OPENER, _CLOSER, _QUOTE),
        to_name=f"{_OPENER}call:",
        to_arguments="{",
        to_end="}" + _CLOSER,
        parameters=NotedArguments("members", _QUOTE),
        results_in_calls="tool_responses" in template,
    )


GEMMA4 = ToolFamily("gemma4", lambda template: _OPENER in template and _CLOSER in template, _format_of)

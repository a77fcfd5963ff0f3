"""Calls of MiniMax M3: nested elements named after parameters, each tag behind a token."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from moiety_text.tools.argument_types import ArgumentSchema, typed_argument
from moiety_text.tools.formats import NotedArguments, ToolFamily, ToolFormat
from moiety_text.tools.json_scanner import MAX_DEPTH, Malformed
from moiety_text.tools.scanning import MAX_NAME_CHARS, SPACE, CallCharacters, expect, take_name, take_until
from moiety_text.tools.sections import SectionReader
from moiety_text.tools.tagged import json_object_of

_TOKEN = "]<]minimax[>["
_ITEM = "item"  # element of a list
_PLAIN = frozenset(["string", "null", "boolean", "number", "integer"])


class MinimaxM3Reader(SectionReader):
    """Reader of `<invoke name="NAME"><P>value</P>…</invoke>` with the token before each tag.

    An object has an element for each member, and a list an element `item` for each of its items.
    """

    opener = f"{_TOKEN}<tool_call>"
    closer = f"{_TOKEN}</tool_call>"
    call_opener = f'{_TOKEN}<invoke name="'

    def _scan_call(self, text: CallCharacters) -> Generator[None, str, tuple[str, str]]:
        name = self._known((yield from take_name(text, '">')))
        schema = self._schema_of(name)
        yield from _take_to_tag(text)
        members = yield from self._take_elements(text, "invoke", schema, schema.root, 0)
        return name, json_object_of(dict(members))

    def _take_elements(
        self, text: CallCharacters, parent: str, schema: ArgumentSchema, part: Any, depth: int
    ) -> Generator[None, str, list[tuple[str, str]]]:
        """Return the names and values of the elements before the end tag of `parent`, and take that tag.

        The beginning of the first tag has been taken. `part` is the schema of the parent's value.
        """
        if depth > MAX_DEPTH:
            raise Malformed
        found: list[tuple[str, str]] = []
        while (tag := (yield from take_until(text, ">", MAX_NAME_CHARS))) != f"/{parent}":
            if tag.startswith("/"):
                raise Malformed
            inner = schema.member(part, tag)
            if tag == _ITEM and "array" in schema.types(part):
                inner = schema.item(part, len(found))
            found.append((tag, (yield from self._take_element(text, tag, schema, inner, depth + 1))))
            yield from _take_to_tag(text)
        return found

    def _take_element(
        self, text: CallCharacters, tag: str, schema: ArgumentSchema, part: Any, depth: int
    ) -> Generator[None, str, str]:
        """Return the value of an element as JSON, and take its end tag."""
        value = yield from take_until(text, f"{_TOKEN}<")
        types = schema.types(part)
        character = yield from text.take()
        if character == "/":
            yield from expect(text, f"{tag}>")
            if not value.strip(SPACE) and not types & _PLAIN:
                return "[]" if "array" in types else "{}"
            return typed_argument(value, types)
        if value.strip(SPACE):
            raise Malformed
        text.put_back(character)
        members = yield from self._take_elements(text, tag, schema, part, depth)
        if "array" in types and all(name == _ITEM for name, _ in members):
            return "[" + ", ".join(value for _, value in members) + "]"
        return json_object_of(dict(members))


def _take_to_tag(text: CallCharacters) -> Generator[None, str, None]:
    """Take white space and the beginning of the next tag."""
    if (yield from take_until(text, f"{_TOKEN}<", MAX_NAME_CHARS)).strip(SPACE):
        raise Malformed


def _format_of(template: str) -> ToolFormat:
    return ToolFormat(
        MinimaxM3Reader,
        (_TOKEN,),
        to_name=f'{_TOKEN}<tool_call>\n{_TOKEN}<invoke name="',
        to_arguments='">',
        to_end=f"{_TOKEN}</invoke>",
        between=f'\n{_TOKEN}<invoke name="',
        closer=f"\n{_TOKEN}</tool_call>",
        parameters=NotedArguments("elements", _TOKEN),
    )


MINIMAX_M3 = ToolFamily("minimax_m3", lambda template: _TOKEN in template, _format_of)

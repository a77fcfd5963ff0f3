"""Python literals as JSON: text, numbers, True, False, None, lists, tuples and dictionaries with keys of text."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Generator

from moiety_text.tools.json_scanner import MAX_DEPTH, MAX_NUMBER_LENGTH, NUMBER, Malformed
from moiety_text.tools.scanning import CallCharacters, Scan, expect_tag, take_past_space

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    **{"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": ""},
    **{"a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0"},
}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


def take_python_value(text: CallCharacters, depth: int = 0) -> Generator[None, str, str]:
    """Return one Python literal as JSON; white space before it is skipped."""
    character = yield from take_past_space(text)
    if character in "'\"":
        content = yield from _take_text(text, character)
        return json.dumps(content, ensure_ascii=False)
    if character in _CLOSERS:
        if depth == MAX_DEPTH:
            raise Malformed
        return (yield from _take_container(text, character, depth + 1))
    return (yield from _take_plain(text, character))


def _take_text(text: CallCharacters, quote: str) -> Generator[None, str, str]:
    parts: list[str] = []
    while (character := (yield from text.take())) != quote:
        if character == "\\":
            character = yield from _take_escape(text)
        parts.append(character)
    content = "".join(parts)
    try:
        return content.encode("utf-16", "surrogatepass").decode("utf-16")  # two escapes may be one character
    except UnicodeDecodeError as exc:
        raise Malformed from exc


def _take_escape(text: CallCharacters) -> Generator[None, str, str]:
    """Return the character of an escape; an unknown escape is itself, as in Python."""
    character = yield from text.take()
    if character in _HEX_LENGTHS:
        digits = ""
        for _ in range(_HEX_LENGTHS[character]):
            digits += yield from text.take()
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError) as exc:
            raise Malformed from exc
    if character == "N":
        yield from expect_tag(text, "{")
        name = ""
        while (letter := (yield from text.take())) != "}":
            name += letter
            if len(name) > 128:
                raise Malformed
        try:
            return unicodedata.lookup(name)
        except KeyError as exc:
            raise Malformed from exc
    return _ESCAPES.get(character, "\\" + character)


def _take_container(text: CallCharacters, opener: str, depth: int) -> Generator[None, str, str]:
    closer = _CLOSERS[opener]
    items: list[str] = []
    while (character := (yield from take_past_space(text))) != closer:
        if items and character != ",":
            raise Malformed
        if items:
            character = yield from take_past_space(text)
            if character == closer:  # a comma may follow the last item
                break
        text.put_back(character)
        item = yield from take_python_value(text, depth)
        if opener == "{":
            if not item.startswith('"'):
                raise Malformed
            yield from expect_tag(text, ":")
            value = yield from take_python_value(text, depth)
            item = f"{item}: {value}"
        items.append(item)
    inner = ", ".join(items)
    return f"{{{inner}}}" if opener == "{" else f"[{inner}]"


def _take_plain(text: CallCharacters, first: str) -> Generator[None, str, str]:
    """Return a number or a word, which ends before a character that cannot be part of it."""
    plain = ""
    character = first
    while character.isalnum() or character in "+-._":
        plain += character
        if len(plain) > MAX_NUMBER_LENGTH:
            raise Malformed
        character = yield from text.take()
    text.put_back(character)
    if plain in _WORDS:
        return _WORDS[plain]
    if NUMBER.fullmatch(plain) is None or math.isinf(float(plain)):
        raise Malformed
    return plain


def json_of_python(text: str) -> str | None:
    """Return a Python list, tuple or dictionary as JSON; None for any other text."""
    if text[:1] not in _CLOSERS:
        return None
    characters = CallCharacters()
    scan: Scan = take_python_value(characters)
    next(scan)
    for at, character in enumerate(text):
        try:
            scan.send(character)
        except Malformed:
            return None
        except StopIteration as end:
            return str(end.value) if at == len(text) - 1 else None
    return None

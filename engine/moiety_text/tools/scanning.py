"""Incremental scanning of one call whose format is written as a generator.

A scan takes one character at a time (`character = yield from text.take()`), raises Malformed if the text is not a valid
call, and returns what it has read. So a format is written like an ordinary parser, and the text may be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from moiety_text.tools.json_scanner import JsonScanner, Malformed

SPACE = " \t\n\r"
MAX_NAME_CHARS = 512  # of a tool or of a parameter, with what stands around it
MAX_TAG_SPACE = 1024  # characters of white space between two tags of a call

Scan = Generator[None, str, Any]  # returns what was read


class CallCharacters:
    """Characters of one call, of which the last one may be put back."""

    def __init__(self) -> None:
        self._back = ""

    def take(self) -> Generator[None, str, str]:
        """Return the next character."""
        if self._back:
            character, self._back = self._back, ""
            return character
        return (yield)

    def put_back(self, character: str) -> None:
        assert not self._back, "one character at most is put back"
        self._back = character

    @property
    def has_back(self) -> bool:
        return bool(self._back)


class ScannedCall:
    """A call that a scan reads as a whole; the scan returns its name and its arguments as a JSON object."""

    def __init__(self, scan: Callable[[CallCharacters], Generator[None, str, tuple[str, str]]]) -> None:
        self.name: str | None = None
        self.is_complete = False
        self._characters = CallCharacters()
        self._scan = scan(self._characters)
        next(self._scan)

    def advance(self, character: str) -> str:
        """Return the arguments at the last character of the call. Raises Malformed."""
        try:
            self._scan.send(character)
        except StopIteration as end:
            assert not self._characters.has_back, "a call ends with a character of its own"
            self.name, arguments = end.value
            self.is_complete = True
            return str(arguments)
        return ""


def take_past_space(text: CallCharacters) -> Generator[None, str, str]:
    """Return the first character that is not white space."""
    for _ in range(MAX_TAG_SPACE):
        character = yield from text.take()
        if character not in SPACE:
            return character
    raise Malformed


def expect(text: CallCharacters, words: str) -> Generator[None, str, None]:
    """Take exactly these characters."""
    for expected in words:
        if (yield from text.take()) != expected:
            raise Malformed


def expect_tag(text: CallCharacters, tag: str) -> Generator[None, str, None]:
    """Take a tag, and white space before it."""
    if tag:
        text.put_back((yield from take_past_space(text)))
        yield from expect(text, tag)


def take_tag(text: CallCharacters, tags: Sequence[str]) -> Generator[None, str, str]:
    """Return which of these tags comes next, after white space. None of them begins with another one."""
    seen = yield from take_past_space(text)
    while seen not in tags:
        if not any(tag.startswith(seen) for tag in tags):
            raise Malformed
        seen += yield from text.take()
    return seen


def take_until(text: CallCharacters, end: str, max_chars: int | None = None) -> Generator[None, str, str]:
    """Return the text before `end`, and take `end`."""
    seen: list[str] = []
    last, length = end[-1], len(end)
    while True:
        character = yield from text.take()
        seen.append(character)
        if character == last and "".join(seen[-length:]) == end:
            return "".join(seen[:-length])
        if max_chars is not None and len(seen) > max_chars + length:
            raise Malformed


def take_name(text: CallCharacters, end: str) -> Generator[None, str, str]:
    """Return a name of bounded length before `end`, without white space around it."""
    name = yield from take_until(text, end, MAX_NAME_CHARS)
    return name.strip(SPACE)


def take_object(text: CallCharacters) -> Generator[None, str, str]:
    """Return a JSON object as valid JSON; white space before it is skipped."""
    character = yield from take_past_space(text)
    if character != "{":
        raise Malformed
    scanner = JsonScanner()
    parts = [scanner.advance(character)]
    while not scanner.is_complete:
        parts.append(scanner.advance((yield from text.take())))
    return "".join(parts)

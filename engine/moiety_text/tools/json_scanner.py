"""One JSON value, checked incrementally, character by character."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Protocol

MAX_DEPTH = 32
MAX_NUMBER_LENGTH = 400  # a double has no more digits before its decimal point

_SPACE = " \t\n\r"
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}


class Malformed(Exception):
    """The text so far is not a prefix of the expected text."""


class Scanner(Protocol):
    """Scanner of a text, character by character, up to its end."""

    @property
    def is_complete(self) -> bool:
        """True once the scanned text is complete; nothing may be added then."""
        ...

    def advance(self, character: str) -> str:
        """Return the output for one more character. Raises Malformed."""
        ...


def scan_whole(scanner: Scanner, text: str) -> str | None:
    """Return the scanner's output for exactly this text; None if the text is malformed, incomplete or too long."""
    output: list[str] = []
    try:
        for character in text:
            if scanner.is_complete:
                return None
            output.append(scanner.advance(character))
    except Malformed:
        return None
    return "".join(output) if scanner.is_complete else None


class JsonScanner:
    """Scanner of an object, a list or a string up to its end."""

    def __init__(self) -> None:
        self.is_complete = False
        self._closers: list[str] = []  # expected closers, the next one last
        self._step: Callable[[str], None] = self._value
        self._is_key = False
        self._rest = ""  # of a literal
        self._number: list[str] = []
        self._hex_digits = ""
        self._owes_low = False  # the first half of a surrogate pair has arrived

    def advance(self, character: str) -> str:
        """Return the character as output; a control character in a string is escaped.

        Models write control characters, but JSON forbids them. Raises Malformed; nothing may be added after that or
        after the value is complete.
        """
        if character < " " and self._step == self._string and not self._owes_low:
            return f"\\u{ord(character):04x}" if character != "\n" else "\\n"
        self._step(character)
        return character

    def _value(self, character: str) -> None:
        if character in _SPACE:
            return
        if character == '"':
            self._begin_string(is_key=False)
        elif character in "{[":
            self._open(character)
        elif not self._closers:
            raise Malformed
        elif character in "-0123456789":
            self._number, self._step = [character], self._in_number
        elif character in _LITERALS:
            self._rest, self._step = _LITERALS[character], self._literal
        else:
            raise Malformed

    def _open(self, character: str) -> None:
        if len(self._closers) == MAX_DEPTH:
            raise Malformed
        self._closers.append("}" if character == "{" else "]")
        self._step = self._first_key if character == "{" else self._first_item

    def _first_item(self, character: str) -> None:
        if character == "]":
            self._close()
        elif character not in _SPACE:
            self._value(character)

    def _first_key(self, character: str) -> None:
        if character == "}":
            self._close()
        else:
            self._key(character)

    def _key(self, character: str) -> None:
        if character == '"':
            self._begin_string(is_key=True)
        elif character not in _SPACE:
            raise Malformed

    def _colon(self, character: str) -> None:
        if character == ":":
            self._step = self._value
        elif character not in _SPACE:
            raise Malformed

    def _next(self, character: str) -> None:
        if character == ",":
            self._step = self._key if self._closers[-1] == "}" else self._value
        elif character == self._closers[-1]:
            self._close()
        elif character not in _SPACE:
            raise Malformed

    def _close(self) -> None:
        self._closers.pop()
        self._end_value()

    def _end_value(self) -> None:
        self.is_complete = not self._closers
        self._step = self._next

    def _begin_string(self, is_key: bool) -> None:
        self._is_key, self._step = is_key, self._string

    def _string(self, character: str) -> None:
        if character == "\\":
            self._step = self._escape
        elif self._owes_low:
            raise Malformed
        elif character == '"' and self._is_key:
            self._step = self._colon
        elif character == '"':
            self._end_value()

    def _escape(self, character: str) -> None:
        if character == "u":
            self._hex_digits, self._step = "", self._hex
        elif character in '"\\/bfnrt' and not self._owes_low:
            self._step = self._string
        else:
            raise Malformed

    def _hex(self, character: str) -> None:
        if character not in "0123456789abcdefABCDEF":
            raise Malformed
        self._hex_digits += character
        if len(self._hex_digits) == 4:
            code = int(self._hex_digits, 16)
            if self._owes_low != (0xDC00 <= code < 0xE000):
                raise Malformed
            self._owes_low, self._step = 0xD800 <= code < 0xDC00, self._string

    def _literal(self, character: str) -> None:
        if character != self._rest[0]:
            raise Malformed
        self._rest = self._rest[1:]
        if not self._rest:
            self._step = self._next

    def _in_number(self, character: str) -> None:
        if character in "0123456789+-.eE":
            self._number.append(character)
            return
        number = "".join(self._number)
        if len(number) > MAX_NUMBER_LENGTH or NUMBER.fullmatch(number) is None or math.isinf(float(number)):
            raise Malformed
        self._step = self._next
        self._next(character)

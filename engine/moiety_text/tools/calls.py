"""One call in the text of an answer, read character by character.

A call has begun once its name is known and allowed, and its arguments have begun. Before that it may still turn out to
be plain text, so it produces no deltas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Protocol

from moiety_text.tools.json_scanner import JsonScanner, Malformed

ARGUMENTS = ("arguments", "parameters")
NAMES = ("name", "tool_name")
KNOWN_MEMBERS = ("id", "tool_call_id", "type", *NAMES, *ARGUMENTS)
_SPACE = " \t\n\r"


class CallText(Protocol):
    """An incremental call."""

    @property
    def name(self) -> str | None:
        """Name of the call; None until the call has begun."""
        ...

    @property
    def is_complete(self) -> bool: ...

    def advance(self, character: str) -> str:
        """Return more of the arguments, if any. Raises Malformed."""
        ...


class ArgumentsOnly:
    """Arguments of a call whose name precedes them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scanner = JsonScanner()
        self.name: str | None = None

    @property
    def is_complete(self) -> bool:
        return self._scanner.is_complete

    def advance(self, character: str) -> str:
        if self.name is None:
            if character in _SPACE:
                return ""
            if character != "{":
                raise Malformed
            self.name = self._name
        return self._scanner.advance(character)


class CallObject:
    """`{"name": …, "arguments": {…}}` with its members in any order, or with `tool_name` and `parameters`.

    Missing arguments are empty. An id and a `type` are skipped; any other member before the call has begun makes it
    no call.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.name: str | None = None
        self.is_complete = False
        self._named: str | None = None  # value of the member `name`, which may follow the arguments
        self._has_arguments = False
        self._early: list[str] = []  # arguments that preceded the name
        self._member = ""
        self._text: list[str] = []  # text of the key, or of the value of a string member
        self._scanner = JsonScanner()
        self._step: Callable[[str], str] = self._opening

    def advance(self, character: str) -> str:
        return self._step(character)

    def _opening(self, character: str) -> str:
        if character == "{":
            self._step = self._first_key
        elif character not in _SPACE:
            raise Malformed
        return ""

    def _first_key(self, character: str) -> str:
        return self._close() if character == "}" else self._key(character)

    def _key(self, character: str) -> str:
        if character == '"':
            self._scanner, self._text, self._step = JsonScanner(), [], self._in_key
            return self._in_key(character)
        if character not in _SPACE:
            raise Malformed
        return ""

    def _in_key(self, character: str) -> str:
        self._text.append(self._scanner.advance(character))
        if self._scanner.is_complete:
            self._member = json.loads("".join(self._text))
            if self._member not in KNOWN_MEMBERS and self.name is None:
                raise Malformed
            self._step = self._colon
        return ""

    def _colon(self, character: str) -> str:
        if character == ":":
            self._step = self._value
        elif character not in _SPACE:
            raise Malformed
        return ""

    def _value(self, character: str) -> str:
        if character in _SPACE:
            return ""
        is_arguments = self._member in ARGUMENTS
        if character != ("{" if is_arguments else '"') or (is_arguments and self._has_arguments):
            raise Malformed
        self._scanner, self._text = JsonScanner(), []
        self._has_arguments = self._has_arguments or is_arguments
        self._step = self._in_arguments if is_arguments else self._in_string
        return self._step(character)

    def _in_arguments(self, character: str) -> str:
        text = self._scanner.advance(character)
        if self._scanner.is_complete:
            self._step = self._next
        if self._named is None:
            self._early.append(text)
            return ""
        self.name = self._named
        return text

    def _in_string(self, character: str) -> str:
        self._text.append(self._scanner.advance(character))
        if not self._scanner.is_complete:
            return ""
        self._step = self._next
        if self._member not in NAMES:
            return ""
        name = json.loads("".join(self._text))
        if self._named is not None or name not in self._names:
            raise Malformed
        self._named = name
        if self._has_arguments:
            self.name = name
        return "".join(self._early)

    def _next(self, character: str) -> str:
        if character == "}":
            return self._close()
        if character == ",":
            self._step = self._key
        elif character not in _SPACE:
            raise Malformed
        return ""

    def _close(self) -> str:
        if self._named is None:
            raise Malformed
        self.is_complete = True
        if self._has_arguments:
            return ""
        self.name = self._named
        return "{}"

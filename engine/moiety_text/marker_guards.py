"""Guard characters that separate real markers of calls and reasoning from text that only spells them.

A reader of answers sees text. Where a tokenizer has a token for a marker (`<tool_call>`, `</think>`), only that token
is the marker. The same characters from ordinary tokens are text, so the detokenizer breaks them with a guard. No reader
treats a guard as part of a marker, and the guard is removed from all output of a reader. The guard is a noncharacter of
Unicode, which has no use in interchanged texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from moiety_text.tools.deltas import CallArguments, Content, Delta, Part, Thinking, assemble

GUARD = "\ufdd0"


class Reader(Protocol):
    """Reader of the text of one answer."""

    def feed(self, text: str) -> list[Delta]: ...

    def end(self) -> list[Delta]: ...


class SpelledMarkers:
    """Inserts guards into one text, incrementally, wherever it spells a marker without its token.

    Holds nothing back.
    """

    def __init__(self, markers: Collection[str]) -> None:
        self._markers = markers
        self._num_kept = max(map(len, markers), default=1) - 1
        self._tail = ""  # end of the text so far, in which a marker may have begun
        self._expected: deque[str] = deque()  # markers whose tokens have arrived but whose texts have not

    def guard(self, text: str, marker: str | None = None) -> str:
        """Return the next text with guards. `marker`: the marker whose token has just arrived."""
        if marker is not None:
            self._expected.append(marker)
        if not text:
            return ""
        seen, begin = self._tail + text, len(self._tail)
        self._tail = seen[-self._num_kept :] if self._num_kept else ""
        parts, done = [], begin
        for end, found in self._ends(seen, begin):
            if self._expected and self._expected[0] == found:
                self._expected.popleft()
                continue
            parts += [seen[done : end - 1], GUARD]  # before its last character
            done = end - 1
        return "".join([*parts, seen[done:]])

    def _ends(self, seen: str, begin: int) -> list[tuple[int, str]]:
        """Return the ends of markers beyond `begin`, in order."""
        found = []
        for marker in self._markers:
            at = seen.find(marker, max(0, begin - len(marker) + 1))
            while at >= 0:
                found.append((at + len(marker), marker))
                at = seen.find(marker, at + 1)
        return sorted(found)


class GuardedReader:
    """Reader of a guarded text whose output contains no guards."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas of more text."""
        return _without_guards(self._reader.feed(text))

    def end(self) -> list[Delta]:
        """Return the remaining deltas at the end of the text."""
        return _without_guards(self._reader.end())

    def read(self, text: str) -> list[Part]:
        """Return the parts of a whole answer."""
        return assemble([*self.feed(text), *self.end()])


def index_before(text: str, num_characters: int) -> int:
    """Return where the last `num_characters` characters of a guarded text begin, guards not counted."""
    if GUARD not in text:
        return len(text) - num_characters
    index = len(text)
    while num_characters and index:
        index -= 1
        num_characters -= text[index] != GUARD
    return index


def _without_guards(deltas: list[Delta]) -> list[Delta]:
    unguarded = [_without_guard(delta) for delta in deltas]
    return [delta for delta in unguarded if not isinstance(delta, Content | Thinking | CallArguments) or delta.text]


def _without_guard(delta: Delta) -> Delta:
    if isinstance(delta, Content | Thinking | CallArguments) and GUARD in delta.text:
        return replace(delta, text=delta.text.replace(GUARD, ""))
    return delta

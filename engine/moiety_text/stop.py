"""Stop strings in an incremental text.

Generation ends at the first character that completes a stop string, and the text is cut where that stop string begins.
If several are complete at that character, the longest applies, since it cuts the most. So the answer does not depend on
how the text is split into pieces, no token is generated to see whether a longer stop string might still follow, and the
output never contains a stop string, unless the stop string at the end is to be included. It knows no tokens.

If an answer may begin with reasoning (see `reasoning`), only the text after it is searched, from the first character
after it that is not white space. A guard (see `guarded`) is not a character of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from moiety_text.errors import UnusableStop
from moiety_text.marker_guards import GUARD, index_before
from moiety_text.pending_whitespace import HeldSpace


class _Matcher:
    """Knuth-Morris-Pratt matcher of one stop string: the length of its prefix that the text now ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._border = [0] * len(stop)  # longest proper prefix of stop[: i + 1] that is also its suffix
        for i in range(1, len(stop)):
            self._border[i] = self._longest(self._border[i - 1], stop[i])

    def _longest(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._border[matched - 1]
        return matched + 1 if self.stop[matched] == character else 0

    def advance(self, character: str) -> bool:
        """Return whether this character completes the stop string."""
        self.matched = self._longest(self.matched, character)
        return self.matched == len(self.stop)


class Marks(Protocol):
    """Markers around the reasoning that an answer may begin with."""

    @property
    def opener(self) -> str: ...

    @property
    def closer(self) -> str: ...

    @property
    def answer_opener(self) -> str:
        """Return the marker that may begin the text after the reasoning; "" for none."""
        ...

    @property
    def is_open(self) -> bool:
        """Return whether the prompt has opened the reasoning."""
        ...


class ThoughtSplitter:
    """Splitter of an answer's incremental text into its reasoning and the rest."""

    def __init__(self, marks: Marks) -> None:
        """Create the splitter. Raises UnusableStop for an empty marker."""
        if not marks.opener or not marks.closer:
            raise UnusableStop("a reasoning marker is empty")
        self._opener, self._closer, self._answer_opener = marks.opener, marks.closer, marks.answer_opener
        self._held = ""  # at the beginning: a possible opener; in the reasoning: the end of the text so far
        self._space = HeldSpace()  # behind what is held at the beginning
        self._step: Callable[[str], tuple[str, str]] = self._thought if marks.is_open else self._start

    def split(self, text: str) -> tuple[str, str]:
        """Return (reasoning, text after it). Text that may become the opener is held back."""
        if self._step == self._start:
            text = self._space.take(text, self._held)
        return self._step(text) if text else ("", "")

    def flush(self) -> str:
        """Return the text held back, which is not reasoning, at the end of the text."""
        held, self._held = "" if self._step == self._thought else self._held + self._space.end(), ""
        return held

    def _start(self, text: str) -> tuple[str, str]:
        held, self._held = self._held + text, ""
        begun = held.lstrip()
        if begun.startswith(self._opener):
            self._step = self._thought
            thought, rest = self._thought(begun[len(self._opener) :])
            return held[: len(held) - len(begun)] + self._opener + thought, rest
        if self._opener.startswith(begun):  # also where there is only white space so far
            self._held = held
            return "", ""
        if self._answer_opener:
            self._step = self._gap
            return self._gap(held)
        self._step = self._answer
        return "", held

    def _thought(self, text: str) -> tuple[str, str]:
        seen = self._held + text
        at = seen.find(self._closer)
        if at < 0:
            self._held = seen[max(0, len(seen) - len(self._closer) + 1) :]
            return text, ""
        end = at + len(self._closer) - len(self._held)
        self._held, self._step = "", self._gap
        gap, rest = self._gap(text[end:])
        return text[:end] + gap, rest

    def _gap(self, text: str) -> tuple[str, str]:
        """Pass white space, and the marker of the answer with white space after it."""
        held, self._held = self._held + text, ""
        rest = held.lstrip()
        gap = held[: len(held) - len(rest)]
        marker = self._answer_opener
        if marker and rest.startswith(marker):
            self._answer_opener = ""
            more, rest = self._gap(rest[len(marker) :])
            return gap + marker + more, rest
        if rest and marker.startswith(rest):
            self._held = rest
            return gap, ""
        if rest:
            self._step = self._answer
        return gap, rest

    def _answer(self, text: str) -> tuple[str, str]:
        return "", text


class StopFinder:
    """Finder of any of `stops` in one text. Constant work per character and stop string, whatever their lengths."""

    def __init__(
        self, stops: Sequence[str], thought: ThoughtSplitter | None = None, *, includes_stop: bool = False
    ) -> None:
        """Create the finder.

        `thought`: splitter of reasoning, which is not searched. With `includes_stop` the text ends with the stop string
        that was found.

        Raises UnusableStop for an empty stop string.
        """
        if not all(stops):
            raise UnusableStop("a stop string is empty; leave it out or give it at least one character")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._thought = thought
        self._includes_stop = includes_stop

    def add(self, text: str) -> tuple[str, str | None]:
        """Return (text that can be output, the stop string that ended the text or None).

        Holds back the longest end that may become a stop string. Nothing may be added after a match.
        """
        if self._thought is None:
            return self._search(text)
        thought, rest = self._thought.split(text)
        found, stop = self._search(rest)
        return thought + found, stop

    def skip(self, text: str) -> str:
        """Return the output of text that is not searched and precedes all searched text."""
        return text if self._thought is None else "".join(self._thought.split(text))

    def finish(self, text: str) -> tuple[str, str | None]:
        """Add the last text: nothing is held back after it."""
        found, stop = self.add(text)
        if stop is None and self._thought is not None:
            more, stop = self._search(self._thought.flush())
            found += more
        return (found, stop) if stop is not None else (found + self.flush(), None)

    def _search(self, text: str) -> tuple[str, str | None]:
        matchers = self._matchers
        for i, character in enumerate(text):
            if character == GUARD:
                continue
            complete = [matcher.stop for matcher in matchers if matcher.advance(character)]
            if complete:
                longest = max(complete, key=len)
                seen = self._held + text[: i + 1]
                self._held = ""
                return seen if self._includes_stop else seen[: index_before(seen, len(longest))], longest
        text = self._held + text
        keep = index_before(text, max((matcher.matched for matcher in matchers), default=0))
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """Return the text held back, at the end of a text without a stop string."""
        held, self._held = self._held, ""
        return held if self._thought is None else held + self._thought.flush()


def new_stop_finder(stops: Sequence[str], marks: Marks | None, *, includes_stop: bool = False) -> StopFinder | None:
    """Return a stop finder for one answer; None where there are no stops. `marks`: of possible reasoning before it."""
    if not stops:
        return None
    return StopFinder(stops, None if marks is None else ThoughtSplitter(marks), includes_stop=includes_stop)

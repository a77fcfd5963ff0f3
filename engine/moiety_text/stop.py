"""Stop strings in a text that comes in pieces.

The rule: generation ends at the first character that completes a stop string, and the text is cut where that stop
string begins. If several are complete at that character, the longest counts, since it cuts the most. So the answer is
the same however the text is cut into pieces, no token is generated to see whether a longer stop string might still
follow, and what is given out never contains a stop string. It knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from moiety_text.errors import UnusableStop


class _Matcher:
    """Knuth-Morris-Pratt for one stop string: how much of its beginning the text now ends with."""

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
        """Whether this character completes the stop string."""
        self.matched = self._longest(self.matched, character)
        return self.matched == len(self.stop)


class StopFinder:
    """Looks for any of `stops` in one text. Constant work a character and stop string, whatever their lengths."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises UnusableStop for an empty stop string."""
        if not all(stops):
            raise UnusableStop("a stop string is empty; leave it out or give it at least one character")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """(what can be given out, the stop string that ended the text or None). Holds back the longest end that may
        yet become a stop string. After a match nothing more may be added."""
        matchers = self._matchers
        for i, character in enumerate(text):
            complete = [matcher.stop for matcher in matchers if matcher.advance(character)]
            if complete:
                longest = max(complete, key=len)
                seen = self._held + text[: i + 1]
                self._held = ""
                return seen[: len(seen) - len(longest)], longest
        text = self._held + text
        keep = len(text) - max((matcher.matched for matcher in matchers), default=0)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What was held back; the text is over without a stop string."""
        held, self._held = self._held, ""
        return held

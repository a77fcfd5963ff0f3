"""Base of readers whose calls each end with a tag, one or several after a marker.

The marker opens a section of calls (`<tool_calls>`); `call_opener` begins each call in it, and `closer` ends it. Where
each call has a marker of its own, `call_opener` is empty. White space may stand between all of them.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

from moiety_text.tools.json_scanner import Malformed
from moiety_text.tools.reader import MAX_SPACE, CallReader
from moiety_text.tools.scanning import CallCharacters, ScannedCall, expect_tag


class SectionReader(CallReader):
    """Reader of calls that a scan reads as a whole. Subclasses implement `_scan_call`."""

    has_call_end = True
    call_opener: ClassVar[str] = ""

    def _scan_call(self, text: CallCharacters) -> Generator[None, str, tuple[str, str]]:
        """Return the name and the arguments of a call after its `call_opener`, through to the tag that ends it."""
        raise NotImplementedError

    def _lead(self, text: str) -> str:
        self._begin(ScannedCall(self._scan_from_opener))
        return text

    def _scan_from_opener(self, text: CallCharacters) -> Generator[None, str, tuple[str, str]]:
        yield from expect_tag(text, self.call_opener)
        return (yield from self._scan_call(text))

    def _known(self, name: str) -> str:
        """Return the name of a callable tool. Raises Malformed for any other name."""
        if name not in self._names:
            raise Malformed
        return name

    def _after(self, text: str) -> str:
        """Continue after a call with another one of the section, or with its end."""
        space, rest = self._after_space(text)
        tags = [tag for tag in (self.call_opener, self.closer) if tag]
        is_far = len(space) > MAX_SPACE
        if not is_far and any(len(rest) < len(tag) and tag.startswith(rest) for tag in tags):
            self._held = space + rest
            return ""
        if not is_far and self.call_opener and rest.startswith(self.call_opener):
            self._open(space)
            return rest
        self._step = self._content
        if not is_far and self.closer and rest.startswith(self.closer):
            return rest[len(self.closer) :]
        self._owes_closer = bool(self.closer)
        return space + rest

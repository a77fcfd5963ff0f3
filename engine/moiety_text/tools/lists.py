"""Readers of calls in a JSON list after a marker: `MARKER[{"name": …, "arguments": {…}}, …]`."""

from __future__ import annotations

from moiety_text.tools.calls import CallObject
from moiety_text.tools.reader import MAX_SPACE, CallReader, without_space

_SPACE = " \t\n\r"


class ListReader(CallReader):
    """Reader of calls in a JSON list after the opener. A single object may stand in place of the list."""

    _is_list = False
    _seen_space = 0  # characters between the marker and the list

    def _open(self, raw: str) -> None:
        super()._open(raw)
        self._is_list, self._seen_space = False, 0

    def _lead(self, text: str) -> str:
        character, rest = text[0], text[1:]
        if character == "[":
            self._keep(character)
            self._is_list = True
            self._begin(CallObject(self._names))
            return rest
        if character == "{":
            self._begin(CallObject(self._names))
            return text
        self._seen_space += 1
        if character not in _SPACE or self._seen_space > MAX_SPACE:
            self._give_up()
            return text
        self._keep(character)
        return rest

    def _closes(self, behind: str, character: str) -> bool:
        return self._is_list and character == "]" and "]" not in behind

    def _after(self, text: str) -> str:
        """Continue after a call of a list with another call, or the list's end."""
        if not self._is_list:
            return super()._after(text)
        space, rest = self._after_space(text)
        if len(space) > MAX_SPACE:
            self._step = self._content
            return space + rest
        if not rest:
            self._held = space
        elif rest[0] == ",":
            super()._open(space + ",")
            if self._raw is not None:
                self._begin(CallObject(self._names))
            return rest[1:]
        else:
            self._owes_closer, self._step = bool(self.closer), self._content
            return rest[1:] if rest[0] == "]" else space + rest
        return ""


class StartListReader(ListReader):
    """Reader of a JSON list of calls at the beginning of the answer. Later lists are content."""

    opener = "["

    def _start(self, text: str) -> str:
        space, rest = self._after_space(text)
        if not rest and len(space) <= MAX_SPACE:
            self._held = space
            return ""
        if rest.startswith("[") and len(space) <= MAX_SPACE:
            self._open(space)
            return rest
        self._step = self._content
        return space + rest

    def _content(self, text: str) -> str:
        held = self._held + text
        given = without_space(held, len(held))  # white space at the end may be all that follows the calls
        self._give(held[:given])
        self._held = held[given:]
        return ""

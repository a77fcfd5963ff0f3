"""Incremental split of one answer's text into content and calls: the part common to all model families.

The text after a marker is a call if it names one of the callable tools, with a JSON object as arguments, and no closing
bracket is left over after it; otherwise it is content, including the marker. So the answer does not depend on how its
text is split into pieces, and no text is lost that is not a call. Where a format ends each call with a tag, a call is
complete at that tag and at no other place. White space before a marker, up to a bound, belongs
to the call. The end of a text that may open a call is held back, and so is a call until it is complete and something
follows it: a stream cannot retract its output, and a client may execute every call that it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from moiety_text.tools.argument_types import ArgumentSchema
from moiety_text.tools.calls import CallObject, CallText
from moiety_text.tools.deltas import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Delta,
    Part,
    assemble,
)
from moiety_text.tools.json_scanner import Malformed

_SPACE = " \t\n\r"
_CLOSERS = "}]"
_PIECE_CHARS = 4096  # of a text that are read at a time, since each step copies the rest of them
MAX_SPACE = 256  # characters of white space held back, since a marker may follow
NO_SCHEMAS: Mapping[str, Any] = MappingProxyType({})


class CallReader:
    """Reader of one answer, owned by the answer's consumer. Subclasses define the text before and after a call."""

    opener: ClassVar[str]
    closer: ClassVar[str] = ""  # after a call, where there is one
    separators: ClassVar[str] = ""  # between calls, besides white space
    has_call_end: ClassVar[bool] = False  # a tag ends each call, so what follows it does not matter

    def __init__(
        self,
        names: Collection[str],
        max_calls: int | None = None,
        *,
        is_rest: bool = False,
        schemas: Mapping[str, Any] = NO_SCHEMAS,
    ) -> None:
        """Create the reader.

        `names` are the callable tools, and `schemas` the JSON schemas of their arguments by name.

        Calls beyond `max_calls` are dropped, with everything after them. `is_rest`: the answer had text before the
        first `feed`.
        """
        self._names = names
        self._schemas = schemas
        self._argument_schemas: dict[str, ArgumentSchema] = {}
        self._max_calls = max_calls
        self._num_ended = 0
        self._held = ""  # content that may open a call
        self._owes_closer = False
        self._raw: list[str] | None = None  # text of a possible call, from its marker on; None outside of one
        self._call: CallText = CallObject(names)
        self._arguments: list[str] = []  # of that call, until it is emitted
        self._behind: str | None = None  # text after a complete call that does not yet decide whether it is one
        self._deltas: list[Delta] = []
        self._step: Callable[[str], str] = self._content if is_rest else self._start

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas of more text. Takes time linear in the text's length."""
        for begin in range(0, len(text), _PIECE_CHARS):
            rest = text[begin : begin + _PIECE_CHARS]
            while rest:
                rest = self._step(rest)
        return self._taken()

    def end(self) -> list[Delta]:
        """Return the remaining deltas at the end of the text. An incomplete call is content."""
        if self._behind is not None:
            self._emit_call()
        elif self._raw is not None:
            self._give_up()
        elif not self._num_ended or self._held.strip(self.separators + _SPACE):
            self._give(self._held)
        return self._taken()

    def read(self, text: str) -> list[Part]:
        """Return the parts of a whole answer."""
        return assemble([*self.feed(text), *self.end()])

    # ── hooks for families: each consumes some of the text and returns the rest ──

    def _start(self, text: str) -> str:
        """Handle the beginning of the answer."""
        self._step = self._content
        return text

    def _lead(self, text: str) -> str:
        """Handle the text after a marker."""
        self._begin(CallObject(self._names))
        return text

    def _after(self, text: str) -> str:
        """Handle the text after a call."""
        self._owes_closer, self._step = bool(self.closer), self._content
        return text

    def _closes(self, behind: str, character: str) -> bool:
        """Return whether a character closes the family's wrapper around the call; `behind` came between."""
        return False

    # ── shared ──

    def _schema_of(self, name: str) -> ArgumentSchema:
        """Return the schema of a tool's arguments, read once for all calls."""
        if name not in self._argument_schemas:
            self._argument_schemas[name] = ArgumentSchema(self._schemas.get(name, {}))
        return self._argument_schemas[name]

    def _after_space(self, text: str) -> tuple[str, str]:
        """Return the white space at the beginning of the held text and more of it, and the rest; hold nothing."""
        held, self._held = self._held + text, ""
        rest = held.lstrip(_SPACE)
        return held[: len(held) - len(rest)], rest

    def _content(self, text: str) -> str:
        held = self._held + text
        markers = (self.opener, self.closer) if self._owes_closer else (self.opener,)
        found = [(at, marker) for marker in markers if (at := held.find(marker)) >= 0]
        if not found:
            given = without_space(held, len(held) - max(overlap(held, marker) for marker in markers))
            self._give(held[:given])
            self._held = held[given:]
            return ""
        at, marker = min(found)
        given, end = without_space(held, at), at + len(marker)
        self._give(held[:given])
        self._held = ""
        self._owes_closer = False
        if marker == self.opener:
            self._open(held[given:end])
        return held[end:]

    def _open(self, raw: str) -> None:
        """Start a possible call, which `raw` has opened."""
        if self._max_calls is not None and self._num_ended >= self._max_calls:
            self._step = self._leave_out
        else:
            self._raw, self._step = [raw], self._lead

    def _leave_out(self, text: str) -> str:
        return ""

    def _begin(self, call: CallText) -> None:
        self._call, self._arguments, self._step = call, [], self._in_call

    def _in_call(self, text: str) -> str:
        for at, character in enumerate(text):
            try:
                self._arguments.append(self._call.advance(character))
            except Malformed:
                self._keep(text[:at])
                self._give_up()
                return text[at:]
            if self._call.is_complete:
                self._keep(text[: at + 1])
                if self.has_call_end:
                    self._emit_call()
                else:
                    self._behind, self._step = "", self._check_behind
                return text[at + 1 :]
        self._keep(text)
        return ""

    def _check_behind(self, text: str) -> str:
        """Handle the text after a complete call, until it is clear that no bracket is left over."""
        assert self._behind is not None, "the call is whole"
        for at, character in enumerate(text):
            is_space = character in _SPACE and len(self._behind) < MAX_SPACE
            if not is_space and not self._closes(self._behind, character):
                behind = self._behind
                if character in _CLOSERS:
                    self._keep(behind)
                    self._give_up()
                    return text[at:]
                self._emit_call()
                return behind + text[at:]
            self._behind += character
        return ""

    def _keep(self, raw: str) -> None:
        assert self._raw is not None, "within what may be a call"
        self._raw.append(raw)

    def _emit_call(self) -> None:
        """Emit the complete call and continue after it."""
        name, index = self._call.name, self._num_ended
        assert name is not None, "a complete call has a name"
        self._num_ended += 1
        self._deltas += [CallBegun(index, name), CallArguments(index, "".join(self._arguments)), CallEnded(index)]
        self._raw, self._behind, self._step = None, None, self._after

    def _give_up(self) -> None:
        """Treat the opened text as content instead of a call."""
        assert self._raw is not None, "within what may be a call"
        self._give("".join(self._raw))
        self._raw, self._behind, self._step = None, None, self._content

    def _give(self, text: str) -> None:
        if text:
            self._deltas.append(Content(text))

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


def without_space(text: str, end: int) -> int:
    """Return where the white space before `end` begins, which may belong to the text that follows."""
    start = max(0, end - MAX_SPACE)
    return start + len(text[start:end].rstrip())


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a prefix of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0

"""Writes the parts of a structured answer as one text, for the reader of `ExternalModelText`.

Reasoning is between `<think>` and `</think>`, and calls have the format of Hermes. Content that only spells one of
these markers is guarded.
"""

from __future__ import annotations

import msgspec

from moiety_platform.external_engines.dialect import MalformedAnswer
from moiety_text.marker_guards import SpelledMarkers
from moiety_text.reasoning_formats import THINK

MAX_CALLS = 256  # of one answer
MAX_CALL_CHARS = 4_000_000  # of all calls of an answer
_CALL, _CALL_END = "<tool_call>", "</tool_call>"


class AnswerWriter:
    """Writer of one answer. Each method returns the text that the part adds."""

    def __init__(self) -> None:
        self._spelled = SpelledMarkers((THINK.opener, THINK.closer, _CALL, _CALL_END))
        self._is_thinking = self._has_content = False
        self._calls: dict[int, tuple[str, list[str]]] = {}  # name and arguments, by the server's index
        self._num_call_chars = 0

    def add_thought(self, thought: str) -> str:
        """Return the text of reasoning. Reasoning after content is left out."""
        if not thought or self._has_content:
            return ""
        text = "" if self._is_thinking else self._mark(THINK.opener)
        self._is_thinking = True
        return text + self._spelled.guard(thought)

    def add_content(self, content: str) -> str:
        """Return the text of content."""
        if not content:
            return ""
        self._has_content = True
        return self._end_thought() + self._spelled.guard(content)

    def add_call(self, number: int | None, name: str, arguments: str) -> None:
        """Add a part of call `number`, or a whole call if that is None. `end` writes the calls.

        Raises MalformedAnswer if the calls are too many or too long.
        """
        number = len(self._calls) if number is None else number
        known, parts = self._calls.setdefault(number, (name, []))
        parts.append(arguments)
        if name and not known:
            self._calls[number] = name, parts
        self._num_call_chars += len(name) + len(arguments)
        if len(self._calls) > MAX_CALLS or self._num_call_chars > MAX_CALL_CHARS:
            raise MalformedAnswer("its calls are too many or too long")

    def end(self) -> str:
        """Return the end of the reasoning, and the calls, which are complete now."""
        text = self._end_thought()
        for _, (name, parts) in sorted(self._calls.items()):
            arguments = "".join(parts).strip() or "{}"
            call = f'\n{{"name": {msgspec.json.encode(name).decode()}, "arguments": {arguments}}}\n'
            text += self._mark(_CALL) + self._spelled.guard(call) + self._mark(_CALL_END)
        self._calls.clear()
        return text

    def _end_thought(self) -> str:
        was_thinking, self._is_thinking = self._is_thinking, False
        return self._mark(THINK.closer) if was_thinking else ""

    def _mark(self, marker: str) -> str:
        return self._spelled.guard(marker, marker)

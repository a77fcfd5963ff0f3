"""Separation of a model's reasoning from its answer.

Reasoning models write it between two markers before the answer (`<think>` … `</think>`: Qwen 3, DeepSeek-R1; the
markers of other models are in `reasoning_formats`). Some chat templates write the first marker themselves, so that an
answer begins inside the reasoning; a template with reasoning switched off writes both. White space around the reasoning
belongs neither to it nor to the answer.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from moiety_text.chat import ChatTemplate
from moiety_text.errors import TemplateRefused
from moiety_text.pending_whitespace import HeldSpace
from moiety_text.reasoning_formats import AUTO, THINK, ReasoningMarkers, find_reasoning_markers
from moiety_text.tools.deltas import Content, Delta, Part, Thinking, assemble
from moiety_text.tools.reader import overlap

SWITCHES = ("enable_thinking", "thinking")  # boolean variables of templates
_SWITCH_NAME = re.compile("think|reason", re.IGNORECASE)
_OFF_WORDS = ("none", "off", "disabled", "no", "false", "no_think", "nothink")
_ON_WORDS = ("on", "enabled", "yes", "true", "think", "high", "medium", "low")


class AnswerReader(Protocol):
    """Incremental parser of the text of one answer. Owned by the answer's reader."""

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas of more text."""
        ...

    def end(self) -> list[Delta]:
        """Return the remaining deltas at the end of the text."""
        ...

    def read(self, text: str) -> list[Part]:
        """Return the parts of a whole answer."""
        ...


@dataclass(frozen=True, slots=True)
class ThoughtSwitch:
    """Chat template variables that switch the model's reasoning on and off."""

    on: Mapping[str, Any]
    off: Mapping[str, Any]
    is_on_by_default: bool

    def variables(self, *, thinks: bool) -> Mapping[str, Any]:
        return self.on if thinks else self.off


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """Reasoning format of one model. `switch`: None where its template has none."""

    switch: ThoughtSwitch | None
    markers: ReasoningMarkers = THINK

    def is_open_after(self, prompt_end: str) -> bool:
        """Return whether a prompt with this end has opened the reasoning."""
        return prompt_end.rstrip().endswith(self.markers.opener)

    def new_reader(self, prompt_end: str, rest: AnswerReader | None) -> ThoughtReader:
        """Return a reader for an answer to a prompt with this end; `rest` reads the text after the reasoning."""
        if self.markers.answer_opener:
            rest = UnwrappingReader(rest, self.markers.answer_opener, self.markers.answer_closer)
        return ThoughtReader(rest, is_open=self.is_open_after(prompt_end), markers=self.markers)


def thoughts_of(template: ChatTemplate, name: str = AUTO) -> ThoughtFormat | None:
    """Return the format by name, or the one that the chat template implies.

    With `auto`, None where the model is not known to support reasoning. Raises UnknownFormat.
    """
    markers = find_reasoning_markers(template, name)
    return None if markers is None else ThoughtFormat(_switch_of(template), markers)


def _switch_of(template: ChatTemplate) -> ThoughtSwitch | None:
    """Return the first template variable that changes the prompt."""
    default = _probe(template, {})
    for on, off in _candidates(template):
        prompt_on, prompt_off = _probe(template, on), _probe(template, off)
        if prompt_on is not None and prompt_off is not None and prompt_on != prompt_off:
            return ThoughtSwitch(on, off, is_on_by_default=default != prompt_off)
    return None


def _candidates(template: ChatTemplate) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield possible switches (on, off): boolean variables first, then variables with known words."""
    if names := [name for name in SWITCHES if name in template.variables]:
        yield dict.fromkeys(names, True), dict.fromkeys(names, False)
    for name in sorted(template.variables):
        if _SWITCH_NAME.search(name) is None:
            continue
        texts = template.compared_texts  # of any variable: a template may give the value another name first
        for off in [text for text in _OFF_WORDS if text in texts]:
            on = next((text for text in _ON_WORDS if text in texts), None)
            yield {} if on is None else {name: on}, {name: off}
        if name.endswith("budget"):
            yield {}, {name: 0}


def _probe(template: ChatTemplate, extra: Mapping[str, Any]) -> str | None:
    """Return the prompt of a short conversation; None where the template refuses it."""
    try:
        return template.render([{"role": "user", "content": "Hi"}], extra=extra)
    except TemplateRefused:
        return None


def num_thought_tokens(
    token_ids: list[int], opener_id: int | None, closer_id: int, *, is_open: bool, space_ids: Container[int] = ()
) -> int:
    """Return the number of an answer's tokens that are reasoning, with markers and the white space before it.

    Reasoning that is never closed extends to the end. `space_ids`: tokens of white space only.
    """
    if not is_open:
        begin = next((token for token in token_ids if token not in space_ids), None)
        if begin is None or begin != opener_id:
            return 0
    return token_ids.index(closer_id) + 1 if closer_id in token_ids else len(token_ids)


class ThoughtReader:
    """Reader that splits the reasoning off the beginning of an answer and passes the rest to another reader, if any."""

    def __init__(self, rest: AnswerReader | None, *, is_open: bool = False, markers: ReasoningMarkers = THINK) -> None:
        """Create the reader. `is_open`: the prompt has opened the reasoning."""
        self._rest = rest
        self._opener, self._closer = markers.opener, markers.closer
        self._held, self._space = "", HeldSpace()  # possibly a marker, or white space before one
        self._step = self._thought if is_open else self._start
        self._has_thought = False  # some reasoning text has arrived
        self._deltas: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        if text := self._space.take(text, self._held):
            self._step(text)
        return self._taken()

    def end(self) -> list[Delta]:
        self._held += self._space.end()
        if self._step == self._thought:
            self._give(self._held)
        elif self._step == self._start:
            self._answer(self._held)
        if self._rest is not None:
            self._deltas += self._rest.end()
        return self._taken()

    def read(self, text: str) -> list[Part]:
        return assemble([*self.feed(text), *self.end()])

    def _start(self, text: str) -> None:
        held = self._held + text
        begun = held.lstrip()
        if begun.startswith(self._opener):
            self._held, self._step = "", self._thought
            self._thought(begun.removeprefix(self._opener))
        elif self._opener.startswith(begun):  # also where there is only white space so far
            self._held = held
        else:
            self._held, self._step = "", self._answer
            self._answer(held)

    def _thought(self, text: str) -> None:
        held = self._held + text
        if not self._has_thought:
            held = held.lstrip()
        at = held.find(self._closer)
        if at >= 0:
            self._give(held[:at].rstrip())
            self._held, self._step = "", self._gap
            self._gap(held[at + len(self._closer) :])
            return
        certain = len(held) - overlap(held, self._closer)
        certain = len(held[:certain].rstrip())  # white space may end the reasoning
        self._give(held[:certain])
        self._held = held[certain:]

    def _gap(self, text: str) -> None:
        """Skip the white space between the reasoning and the answer."""
        text = text.lstrip()
        if text:
            self._step = self._answer
            self._answer(text)

    def _answer(self, text: str) -> None:
        if self._rest is not None:
            self._deltas += self._rest.feed(text)
        elif text:
            self._deltas.append(Content(text))

    def _give(self, thought: str) -> None:
        if thought:
            self._has_thought = True
            self._deltas.append(Thinking(thought))

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


class UnwrappingReader:
    """Reader that removes the markers around an answer and passes the answer to another reader, if any.

    White space within the markers is removed too. An answer that does not begin with the opener is passed as it is.
    """

    def __init__(self, rest: AnswerReader | None, opener: str, closer: str) -> None:
        self._rest = rest
        self._opener, self._closer = opener, closer
        self._held, self._space = "", HeldSpace()  # possibly a marker, and white space around it
        self._step = self._start

    def feed(self, text: str) -> list[Delta]:
        text = self._space.take(text, self._held)
        return self._passed(self._step(text)) if text else []

    def end(self) -> list[Delta]:
        held, self._held = self._held + self._space.end(), ""
        deltas = self._passed(held if self._step != self._gap else "")
        return deltas if self._rest is None else [*deltas, *self._rest.end()]

    def read(self, text: str) -> list[Part]:
        return assemble([*self.feed(text), *self.end()])

    def _start(self, text: str) -> str:
        held, self._held = self._held + text, ""
        begun = held.lstrip()
        if begun.startswith(self._opener):
            self._step = self._gap
            return self._gap(begun.removeprefix(self._opener))
        if self._opener.startswith(begun):
            self._held = held
            return ""
        self._step = self._plain
        return held

    def _gap(self, text: str) -> str:
        text = text.lstrip()
        if not text:
            return ""
        self._step = self._answer
        return self._answer(text)

    def _answer(self, text: str) -> str:
        held = self._held + text
        at = held.find(self._closer)
        if at >= 0:
            self._held, self._step = "", self._behind
            return held[:at].rstrip() + self._behind(held[at + len(self._closer) :])
        certain = len(held[: len(held) - overlap(held, self._closer)].rstrip())
        self._held = held[certain:]
        return held[:certain]

    def _behind(self, text: str) -> str:
        """Return what follows the closer, without white space at once after it."""
        text = text.lstrip()
        if text:
            self._step = self._plain
        return text

    def _plain(self, text: str) -> str:
        return text

    def _passed(self, text: str) -> list[Delta]:
        if self._rest is not None:
            return self._rest.feed(text)
        return [Content(text)] if text else []

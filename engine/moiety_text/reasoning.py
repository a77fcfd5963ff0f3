"""Separation of a model's reasoning from its answer.

Reasoning models write it between two markers before the answer (`<think>` … `</think>`: Qwen 3, DeepSeek-R1). Some chat
templates write the first marker themselves, so that an answer begins inside the reasoning; a template with reasoning
switched off writes both. White space around the reasoning belongs neither to it nor to the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from moiety_text.chat import ChatTemplate
from moiety_text.errors import TemplateRefused
from moiety_text.tools.deltas import Content, Delta, Part, Thinking, assemble
from moiety_text.tools.reader import overlap

OPENER, CLOSER = "<think>", "</think>"
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

    def new_reader(self, prompt_end: str, rest: AnswerReader | None) -> ThoughtReader:
        """Return a reader for an answer to a prompt with this end; `rest` reads the text after the reasoning."""
        return ThoughtReader(rest, is_open=prompt_end.rstrip().endswith(OPENER))


def thoughts_of(template: ChatTemplate) -> ThoughtFormat | None:
    """Return the format that the chat template implies; None where the model is not known to support reasoning."""
    if not template.spells(OPENER) and not template.spells(CLOSER):
        return None
    return ThoughtFormat(_switch_of(template))


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


def num_thought_tokens(token_ids: list[int], opener_id: int | None, closer_id: int, *, is_open: bool) -> int:
    """Return the number of an answer's tokens that are reasoning, markers included.

    Reasoning that is never closed extends to the end.
    """
    if not token_ids or not (is_open or token_ids[0] == opener_id):
        return 0
    return token_ids.index(closer_id) + 1 if closer_id in token_ids else len(token_ids)


class ThoughtReader:
    """Reader that splits the reasoning off the beginning of an answer and passes the rest to another reader, if any."""

    def __init__(self, rest: AnswerReader | None, *, is_open: bool = False) -> None:
        """Create the reader. `is_open`: the prompt has opened the reasoning."""
        self._rest = rest
        self._held = ""  # possibly a marker, or white space before one
        self._step = self._thought if is_open else self._start
        self._has_thought = False  # some reasoning text has arrived
        self._deltas: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        self._step(text)
        return self._taken()

    def end(self) -> list[Delta]:
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
        if begun.startswith(OPENER):
            self._held, self._step = "", self._thought
            self._thought(begun.removeprefix(OPENER))
        elif OPENER.startswith(begun):  # also where there is only white space so far
            self._held = held
        else:
            self._held, self._step = "", self._answer
            self._answer(held)

    def _thought(self, text: str) -> None:
        held = self._held + text
        if not self._has_thought:
            held = held.lstrip()
        at = held.find(CLOSER)
        if at >= 0:
            self._give(held[:at].rstrip())
            self._held, self._step = "", self._gap
            self._gap(held[at + len(CLOSER) :])
            return
        certain = len(held) - overlap(held, CLOSER)
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

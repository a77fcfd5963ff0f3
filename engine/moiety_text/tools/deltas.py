"""Deltas of an answer's incremental text, and the assembled answer.

The calls of one answer are numbered from 0; their deltas come one call after another: CallBegun, CallArguments,
CallEnded. They come once the call is complete and valid, so a call is never retracted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


class Content(_Text):
    """Text outside of calls."""

    __slots__ = ()


class Thinking(_Text):
    """Reasoning text before the answer, not part of it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _CallDelta:
    index: int


@dataclass(frozen=True, slots=True)
class CallBegun(_CallDelta):
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments(_CallDelta):
    """The JSON object of the call's arguments, or more of it."""

    text: str


class CallEnded(_CallDelta):
    """The call's arguments are complete and valid JSON."""

    __slots__ = ()


Delta = Content | Thinking | CallBegun | CallArguments | CallEnded


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # a JSON object


class Thought(_Text):
    """Reasoning of the model before its answer."""

    __slots__ = ()


Part = str | Call | Thought
Parts = Sequence[Part]  # of a whole answer: its reasoning, if any, then its text and its calls in order


def assemble(deltas: Iterable[Delta]) -> list[Part]:
    """Return the parts of a whole answer; no text is empty or adjacent to another. Takes linear time."""
    parts: list[Part] = []
    kind: type[Content | Thinking] | None = None  # of the texts, which are adjacent
    texts: list[str] = []
    name = ""

    def end_text() -> None:
        nonlocal kind
        if kind is not None:
            text = "".join(texts)
            parts.append(text if kind is Content else Thought(text))
            texts.clear()
        kind = None

    for delta in deltas:
        match delta:
            case Content(text) | Thinking(text):
                if kind is not type(delta):
                    end_text()
                    kind = type(delta)
                texts.append(text)
            case CallBegun():
                end_text()
                name = delta.name
            case CallArguments():
                texts.append(delta.text)
            case CallEnded():
                parts.append(Call(name, "".join(texts)))
                texts.clear()
    end_text()
    return parts

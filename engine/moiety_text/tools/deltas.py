"""Deltas of an answer's incremental text, and the assembled answer.

The calls of one answer are numbered from 0; their deltas come one call after another: CallBegun, CallArguments,
CallEnded. They come once the call is complete and valid, so a call is never retracted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning text before the answer, not part of it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The JSON object of the call's arguments, or more of it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call's arguments are complete and valid JSON."""

    index: int


Delta = Content | Thinking | CallBegun | CallArguments | CallEnded


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning of the model before its answer."""

    text: str


Part = str | Call | Thought
Parts = Sequence[Part]  # of a whole answer: its reasoning, if any, then its text and its calls in order


def assemble(deltas: Iterable[Delta]) -> list[Part]:
    """Return the parts of a whole answer; no text is empty or adjacent to another."""
    parts: list[Part] = []
    name, arguments = "", ""
    for delta in deltas:
        match delta:
            case Content(text):
                if parts and isinstance(last := parts[-1], str):
                    parts[-1] = last + text
                else:
                    parts.append(text)
            case Thinking(text):
                if parts and isinstance(last := parts[-1], Thought):
                    parts[-1] = Thought(last.text + text)
                else:
                    parts.append(Thought(text))
            case CallBegun():
                name, arguments = delta.name, ""
            case CallArguments():
                arguments += delta.text
            case CallEnded():
                parts.append(Call(name, arguments))
    return parts

"""What comes of an answer's text while it comes, and the whole of it.

The calls of one answer are numbered from 0; their deltas come one call after another: CallBegun, CallArguments,
CallEnded. They come once the call is whole and valid, so a call that was told is never taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """Text that comes before the answer, and is none of it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The JSON object that holds the call's arguments, or more of it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call's arguments are whole and valid JSON."""

    index: int


Delta = Content | Thinking | CallBegun | CallArguments | CallEnded


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model thought before it answered."""

    text: str


Part = str | Call | Thought
Parts = Sequence[Part]  # of a whole answer: its thought, if any, then its text and its calls in their order


def assemble(deltas: Iterable[Delta]) -> list[Part]:
    """The parts of a whole answer, no text empty or next to another."""
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

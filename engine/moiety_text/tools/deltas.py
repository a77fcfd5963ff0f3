"""What comes of an answer's text while it comes, and the whole of it.

The calls of one answer are numbered from 0; their deltas come one call after another: CallBegun, CallArguments …, and
then CallEnded, or CallBroken where what was told as a call turned out to be none.
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
    """More of the JSON object that are the call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call's arguments are whole and valid JSON."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The call's arguments end here and are no JSON. `text` is all that the model wrote of the call, its marker too."""

    index: int
    text: str


Delta = Content | Thinking | CallBegun | CallArguments | CallEnded | CallBroken


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
    """The parts of a whole answer, no text empty or next to another. A broken call is the text that the model wrote."""
    parts: list[Part] = []
    name, arguments = "", ""
    for delta in deltas:
        match delta:
            case Content(text) | CallBroken(_, text):
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

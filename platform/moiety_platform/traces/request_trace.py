"""Trace of a running request: the start times of its phases. Only numbers, since most traces are dropped."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from moiety_platform.randomness import random_hex


class Phase(StrEnum):
    """Phases of a request in the gateway.

    Each begins where the previous one ends, so their sum is the request's time.
    """

    RECEIVE = "receive"  # the body is received and parsed
    PREPARE = "prepare"  # class, admission gate, chat template and tokenization
    HOLD = "quota.hold"
    ADMISSION = "admission"  # submitted to engines, until all sequences are admitted
    ANSWER = "answer"  # output is relayed, to the last byte
    SETTLE = "quota.settle"


class RequestTrace:
    """Trace owned by its request's record. Without `is_recorded` nothing is recorded."""

    __slots__ = ("_unix_ns", "is_recorded", "marks", "parent", "span_id", "trace_id")

    def __init__(self, parent: Parent | None, start_ns: int, unix_ns: Callable[[], int], is_recorded: bool) -> None:
        self.parent = parent
        self.is_recorded = is_recorded
        self.trace_id = random_hex(16) if parent is None else parent.trace_id
        self.span_id = random_hex(8)
        self.marks: list[tuple[Phase, int]] = [(Phase.RECEIVE, start_ns)]
        self._unix_ns = unix_ns

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin this one."""
        if self.is_recorded:
            self.marks.append((phase, self._unix_ns()))

    @property
    def traceparent(self) -> str:
        """The W3C context for engines; where nothing is recorded here, the client's own, which can be empty."""
        if self.is_recorded:
            return format_traceparent(self.trace_id, self.span_id)
        return "" if self.parent is None else self.parent.traceparent


_TRACEPARENT = re.compile(
    r"(?:00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}|(?!00|ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?)"
)
MAX_LENGTH = 512


class Parent(NamedTuple):
    """A client's span, in hexadecimal, and the client's traceparent."""

    trace_id: str
    span_id: str
    traceparent: str


def parse_traceparent(text: str | None) -> Parent | None:
    """Return the parent; None for a missing or invalid context, with which a request starts a new trace."""
    if not text or len(text) > MAX_LENGTH or (found := _TRACEPARENT.fullmatch(text)) is None:
        return None
    trace_id, span_id = found[1] or found[3], found[2] or found[4]
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return Parent(trace_id, span_id, text)


def format_traceparent(trace_id: str, span_id: str) -> str:
    """Return a traceparent with the sampled flag: the decision is made at the end, so everybody records."""
    return f"00-{trace_id}-{span_id}-01"

"""Trace of a running request: the start times of its phases. Only numbers, since most traces are dropped."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from moiety_platform.randomness import random_hex
from moiety_platform.traces.context import Parent, format_traceparent


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

"""A running request's trace: when it went from one phase to the next. Only numbers, since most are thrown away."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from moiety_platform.randomness import random_hex
from moiety_platform.traces.context import Parent, format_traceparent


class Phase(StrEnum):
    """What the gateway is at. One begins where another ends, so together they are all of a request's time."""

    RECEIVE = "receive"  # the body comes and is read
    PREPARE = "prepare"  # class, gate, template and tokens
    HOLD = "quota.hold"
    ADMISSION = "admission"  # given to engines, until all of it is admitted
    ANSWER = "answer"  # what comes is relayed, to the last byte
    SETTLE = "quota.settle"


class RequestTrace:
    """Owned by its request's record. Without `is_recorded` nobody will ask for it, and nothing is noted."""

    __slots__ = ("_unix_ns", "is_recorded", "marks", "parent", "span_id", "trace_id")

    def __init__(self, parent: Parent | None, start_ns: int, unix_ns: Callable[[], int], is_recorded: bool) -> None:
        self.parent = parent
        self.is_recorded = is_recorded
        self.trace_id = random_hex(16) if parent is None else parent.trace_id
        self.span_id = random_hex(8)
        self.marks: list[tuple[Phase, int]] = [(Phase.RECEIVE, start_ns)]
        self._unix_ns = unix_ns

    def enter(self, phase: Phase) -> None:
        """The phase before ends now, and this one begins."""
        if self.is_recorded:
            self.marks.append((phase, self._unix_ns()))

    @property
    def traceparent(self) -> str:
        """The context for engines, in W3C form: the client's own where nothing is recorded here, and then perhaps
        empty."""
        if self.is_recorded:
            return format_traceparent(self.trace_id, self.span_id)
        return "" if self.parent is None else self.parent.traceparent

"""Tracing of one gateway: starts a trace with each request, samples it at the end, and sends the kept ones.

There is no global provider. Without senders nothing is recorded, and a client's context still reaches the engine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from moiety_platform.randomness import random_hex
from moiety_platform.traces.sampling import EndedRequest, Sampler, SamplingDecision, SamplingTerms
from moiety_platform.traces.span import Span

MAX_SHARED = 8192


class Sender(Protocol):
    """Non-blocking receiver of spans; implemented by `sender.SpanSender`, which is slow to import."""

    name: str
    num_sent: int
    dropped: Counter[str]

    def put(self, spans: Sequence[Span]) -> None: ...

    def close(self) -> None: ...


class Tracing:
    """Tracing, passed as an argument; the owner closes its senders.

    A span that several traces link to, such as an engine step, is sent with the first kept one.
    """

    def __init__(self, terms: SamplingTerms | None = None, senders: Sequence[Sender] = ()) -> None:
        self.sampler = Sampler(terms or SamplingTerms())
        self.senders = tuple(senders)
        self._shared: dict[str, None] = {}  # ids of the last shared spans that were sent

    def use(self, senders: Sequence[Sender]) -> tuple[Sender, ...]:
        """Send kept traces to these senders from now on; return the previous ones, which the caller closes."""
        before, self.senders = self.senders, tuple(senders)
        return before

    def start(self, traceparent: str | None, start_ns: int, unix_ns: Callable[[], int]) -> RequestTrace:
        """Return a request's trace, within the client's if its context is valid."""
        parent = parse_traceparent(traceparent) if traceparent else None
        return RequestTrace(parent, start_ns, unix_ns, is_recorded=bool(self.senders))

    def end(self, ending: EndedRequest, now_s: float, make_spans: Callable[[SamplingDecision], Sequence[Span]]) -> None:
        """Sample a trace, and send the result of `make_spans` if it is kept."""
        if not self.senders:
            return
        verdict = self.sampler.decide(ending, now_s)
        if verdict.is_kept:
            made = make_spans(verdict)
            spans = [span for span in made if span.trace_id == ending.trace_id or self._is_new(span.span_id)]
            for sender in self.senders:
                sender.put(spans)

    def _is_new(self, span_id: str) -> bool:
        """Return whether a shared span was not yet sent; it counts as sent from now on."""
        if span_id in self._shared:
            return False
        self._shared[span_id] = None
        if len(self._shared) > MAX_SHARED:
            del self._shared[next(iter(self._shared))]
        return True

    def close(self) -> None:
        """Send the rest and stop. Blocks for a few seconds at most."""
        for sender in self.senders:
            sender.close()


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
        drawn = random_hex(24)
        self.trace_id = drawn[16:] if parent is None else parent.trace_id
        self.span_id = drawn[:16]
        self.marks: list[tuple[Phase, int]] = [(Phase.RECEIVE, start_ns)]
        self._unix_ns = unix_ns

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin this one."""
        if self.is_recorded:
            self.marks.append((phase, self._unix_ns()))

    def now_ns(self) -> int:
        """Return the time, in nanoseconds since 1970."""
        return self._unix_ns()

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

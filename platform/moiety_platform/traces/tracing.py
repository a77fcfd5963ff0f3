"""Tracing of one gateway: starts a trace with each request, samples it at the end, and sends the kept ones.

There is no global provider. Without senders nothing is recorded, and a client's context still reaches the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from moiety_platform.traces.request_trace import RequestTrace, parse_traceparent
from moiety_platform.traces.sampling import Ending, Sampler, SamplingDecision, SamplingTerms
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
        return RequestTrace(parse_traceparent(traceparent), start_ns, unix_ns, is_recorded=bool(self.senders))

    def end(self, ending: Ending, now_s: float, make_spans: Callable[[SamplingDecision], Sequence[Span]]) -> None:
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

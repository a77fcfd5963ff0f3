"""Background sender of spans to one destination, in a thread of its own.

Fails open: callers never wait. Spans that exceed the queue, or that the destination does not accept in time, are
dropped and counted.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import structlog

from moiety_platform.traces.exporters import Exporter
from moiety_platform.traces.span import Span

SERVICE_NAME = "moiety-gateway"
QUEUE_FULL, NOT_TAKEN = "queue_full", "not_taken"
CAPACITY = 8192  # spans
BATCH = 512
INTERVAL_S = 1.0
LAST_EXPORT_S = 1.0

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class SpanSender:
    """Sender to one destination, which `name` identifies in metrics. Owned and closed by the entry point."""

    name: str
    exporter: Exporter
    instance_id: str
    _: KW_ONLY
    capacity: int = CAPACITY
    interval_s: float = INTERVAL_S

    def __post_init__(self) -> None:
        self.num_sent = 0
        self.dropped: Counter[str] = Counter()
        self._resource = {"service.name": SERVICE_NAME, "service.instance.id": self.instance_id}
        self._queue: deque[Span] = deque()
        self._woken = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"spans to {self.name}", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[Span]) -> None:
        """Queue the spans of a trace. Never waits."""
        if len(self._queue) + len(spans) > self.capacity:
            self.dropped[QUEUE_FULL] += len(spans)
            return
        self._queue.extend(spans)
        if len(self._queue) >= BATCH:
            self._woken.set()

    def close(self, timeout_s: float = LAST_EXPORT_S) -> None:
        """Send the rest, within the timeout. Idempotent."""
        self._is_closing = True
        self._woken.set()
        self._thread.join(timeout_s)
        self.exporter.shutdown()

    def _run(self) -> None:
        while not self._is_closing or self._queue:
            self._woken.wait(self.interval_s)
            self._woken.clear()
            while self._queue:
                self._send([self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))])

    def _send(self, spans: list[Span]) -> None:
        try:
            is_taken = self.exporter.export(self._resource, spans)
        except Exception:  # top level of a thread that lives as long as the process
            log.exception("spans_not_sent", destination=self.name)
            is_taken = False
        if is_taken:
            self.num_sent += len(spans)
        else:
            self.dropped[NOT_TAKEN] += len(spans)

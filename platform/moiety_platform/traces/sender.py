"""Sends spans to one place by OTLP, over HTTP or gRPC, from a thread of its own.

Fails open: whoever hands spans over never waits. What does not fit into the queue, and what the other side does not
take in time, is dropped and counted.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from importlib.metadata import version

import requests
import structlog
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from moiety_platform.traces.span import Span

SERVICE_NAME = "moiety-gateway"
QUEUE_FULL, NOT_TAKEN = "queue_full", "not_taken"
CAPACITY = 8192  # spans
BATCH = 512
INTERVAL_S = 1.0
EXPORT_TIMEOUT_S = 10.0
LAST_EXPORT_S = 1.0

log = structlog.get_logger(__name__)

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def otlp_exporter(endpoint: str, token: str | None = None) -> SpanExporter:
    """To `endpoint`/v1/traces. With a token it is a store of ours, which is spoken to without a proxy."""
    session = requests.Session()
    session.trust_env = token is None
    return OTLPSpanExporter(
        endpoint=f"{endpoint.rstrip('/')}/v1/traces",
        headers={"Authorization": f"Bearer {token}"} if token else None,
        timeout=EXPORT_TIMEOUT_S,
        compression=Compression.Gzip,
        session=session,
    )


def grpc_exporter(endpoint: str) -> SpanExporter:
    """To an address such as http://collector:4317, encrypted where it is https. Raises ModuleNotFoundError without the
    package that is only for this."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415  # optional
        OTLPSpanExporter as GrpcSpanExporter,
    )

    return GrpcSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)


class SpanSender:
    """Owned by the entry point, which closes it. `name` stands in metrics for where it sends to."""

    def __init__(
        self,
        name: str,
        exporter: SpanExporter,
        instance_id: str,
        *,
        capacity: int = CAPACITY,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.name = name
        self.num_sent = 0
        self.dropped: Counter[str] = Counter()
        self._exporter = exporter
        self._resource = Resource.create({"service.name": SERVICE_NAME, "service.instance.id": instance_id})
        self._scope = InstrumentationScope("moiety_platform", version("moiety"))
        self._capacity = capacity
        self._interval_s = interval_s
        self._queue: deque[Span] = deque()
        self._woken = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"spans to {name}", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[Span]) -> None:
        """Send a trace some time soon. Never waits."""
        if len(self._queue) + len(spans) > self._capacity:
            self.dropped[QUEUE_FULL] += len(spans)
            return
        self._queue.extend(spans)
        if len(self._queue) >= BATCH:
            self._woken.set()

    def close(self, timeout_s: float = LAST_EXPORT_S) -> None:
        """Send what is left, unless it takes longer. Idempotent."""
        self._is_closing = True
        self._woken.set()
        self._thread.join(timeout_s)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._is_closing or self._queue:
            self._woken.wait(self._interval_s)
            self._woken.clear()
            while self._queue:
                self._send([self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))])

    def _send(self, spans: list[Span]) -> None:
        try:
            result = self._exporter.export([self._readable(span) for span in spans])
        except Exception:  # the root of a thread that lives as long as the process
            log.exception("spans_not_sent", destination=self.name)
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self.num_sent += len(spans)
        else:
            self.dropped[NOT_TAKEN] += len(spans)

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id),
            parent=None if span.parent_id is None else _context(span.trace_id, span.parent_id),
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, event.unix_ns) for event in span.events],
            links=[Link(_context(*linked)) for linked in span.links],
            kind=span.kind,
            status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)

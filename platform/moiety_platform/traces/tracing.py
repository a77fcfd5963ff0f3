"""Where spans go, and the spans of one request in the terms of OpenTelemetry's GenAI conventions.

The engine's phases are the engine's own spans: it gets the context over the wire. The tracer is passed by argument;
there is no global provider. Without an exporter nothing is recorded, and a client's context still reaches the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

SERVICE_NAME = "moiety-gateway"

_propagator = TraceContextTextMapPropagator()


def build_provider(otlp_endpoint: str | None) -> trace.TracerProvider:
    """A provider that exports by OTLP/HTTP to `otlp_endpoint`, or one that records nothing. Fails open: an exporter
    that cannot reach its collector drops spans and never holds up a request."""
    if otlp_endpoint is None:
        return trace.NoOpTracerProvider()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  # slow to import

    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE_NAME}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{otlp_endpoint.rstrip('/')}/v1/traces", timeout=5)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def shut_down(provider: trace.TracerProvider) -> None:
    """Send what is still buffered and stop. Blocks for a few seconds at most."""
    if isinstance(provider, TracerProvider):
        provider.shutdown()


class Tracing:
    """Makes request spans with one tracer."""

    def __init__(self, provider: trace.TracerProvider) -> None:
        self._tracer = provider.get_tracer("moiety_platform", version("moiety"))

    def start_request(self, operation: str, traceparent: str | None, tracestate: str | None) -> RequestSpan:
        """The server's span, a child of the client's context if it sent a valid one."""
        carrier = {}
        if traceparent:
            carrier["traceparent"] = traceparent
            if tracestate:
                carrier["tracestate"] = tracestate
        parent = _propagator.extract(carrier) if carrier else None
        span = self._tracer.start_span(operation, context=parent, kind=trace.SpanKind.SERVER)
        return RequestSpan(self._tracer, span)


class RequestSpan:
    """The span of one request and its children. Ended once, by its owner."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self.is_recording = span.is_recording()

    @property
    def traceparent(self) -> str:
        """The context for the engine, in W3C form; empty if there is none."""
        context = self._span.get_span_context()
        if not context.is_valid:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(self, name: str) -> AbstractContextManager[None]:
        """A span around a part of the gateway's own work."""
        return self._child(name) if self.is_recording else nullcontext()

    @contextmanager
    def _child(self, name: str) -> Iterator[None]:
        span = self._tracer.start_span(name, context=trace.set_span_in_context(self._span))
        try:
            yield
        except BaseException as exc:  # a cancellation as well: the span says how its work ended
            span.set_status(trace.StatusCode.ERROR, type(exc).__name__)
            raise
        finally:
            span.end()

    def note(self, event: str, attributes: Mapping[str, AttributeValue]) -> None:
        """Something happened now."""
        if self.is_recording:
            self._span.add_event(event, attributes)

    def describe(self, name: str, attributes: Mapping[str, AttributeValue | None]) -> None:
        if self.is_recording:
            self._span.update_name(name)
            self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})

    def end(self, error_code: str | None) -> None:
        if self.is_recording and error_code is not None:
            self._span.set_attribute("error.type", error_code)
            self._span.set_status(trace.StatusCode.ERROR, error_code)
        self._span.end()

"""A finished request's phases as OpenTelemetry spans, children of the gateway's span; what the scheduler did to the
request stands in them as events.

The times come from the request's Phases; nothing is measured here. Never a prompt, never a key.
"""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from moiety_wire.messages import Event, Finished, Phases, Submit

_propagator = TraceContextTextMapPropagator()


def export_by_otlp(engine_id: str) -> TracerProvider:
    """A provider that sends to the collector named by OpenTelemetry's standard environment variables."""
    resource = Resource.create({"service.name": "moiety-engine", "service.instance.id": engine_id})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def phase_recorder(tracer: Tracer) -> Callable[[Submit, Finished], None]:
    """A function that turns the end of a request into its spans."""

    def record(submit: Submit, finished: Finished) -> None:
        phases = finished.phases
        parent = _propagator.extract({"traceparent": submit.traceparent}) if submit.traceparent else None
        end_ns = phases.finished_unix_ns
        spans = (
            ("engine.queue", phases.received_unix_ns, phases.scheduled_unix_ns or end_ns),
            ("engine.prefill", phases.scheduled_unix_ns, phases.first_token_unix_ns or end_ns),
            ("engine.decode", phases.first_token_unix_ns, end_ns),
        )
        attributes = {
            "gen_ai.request.model": submit.model,
            "moiety.tenant_id": submit.tenant_id,
            "moiety.service_class": finished.served_class or submit.service.name,
            "moiety.service_class.asked": submit.service.name,
            "moiety.request_id": submit.request_id,
        }
        for name, start_ns, stop_ns in spans:
            if not start_ns or not stop_ns:
                continue  # the request did not get there
            span = tracer.start_span(name, parent, SpanKind.INTERNAL, attributes, start_time=start_ns)
            if name == "engine.prefill":
                span.set_attribute("gen_ai.usage.input_tokens", finished.num_prompt_tokens)
                span.set_attribute("moiety.cached_tokens", finished.num_cached_tokens)
            if name == "engine.decode":
                span.set_attribute("gen_ai.usage.output_tokens", finished.num_output_tokens)
                span.set_attribute("gen_ai.response.finish_reasons", (str(finished.reason),))
                span.set_attribute("moiety.recomputed_tokens", finished.num_recomputed_tokens)
            for event in finished.events:
                if phase_of(event, phases) == name:
                    span.add_event(f"moiety.{event.kind}", _attributes(event), timestamp=event.unix_ns)
            span.end(max(stop_ns, start_ns))

    return record


def phase_of(event: Event, phases: Phases) -> str:
    """The span that an event belongs to: the last phase that had begun by then."""
    if phases.first_token_unix_ns and event.unix_ns >= phases.first_token_unix_ns:
        return "engine.decode"
    if phases.scheduled_unix_ns and event.unix_ns >= phases.scheduled_unix_ns:
        return "engine.prefill"
    return "engine.queue"


def _attributes(event: Event) -> dict[str, str]:
    attributes = {"moiety.reason": event.reason.value}
    if event.other:
        attributes["moiety.beneficiary"] = event.other
    return attributes

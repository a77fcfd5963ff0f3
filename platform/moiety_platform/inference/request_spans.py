"""Spans of an ended request: its own, one per phase of the gateway, and those of its sequences at engines.

The times of the latter are in `Finished`. Attributes follow OpenTelemetry's GenAI conventions, with `moiety.*` for what
they lack. They contain no text from clients, so a model's name is included only if the model exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from opentelemetry.trace import SpanKind

from moiety_platform.inference.engine_attempts import EngineAttempt
from moiety_platform.inference.request_record import COMPLETED, UNKNOWN_MODEL, RequestRecord
from moiety_platform.inference.step_spans import link_to, notes_of, steps_of
from moiety_platform.randomness import random_hex
from moiety_platform.traces.sampling import SamplingDecision
from moiety_platform.traces.span import Attribute, Link, Span, SpanEvent
from moiety_platform.traces.tracing import Phase
from moiety_platform.usage.row import UsageRow
from moiety_wire.messages import Finished, FinishReason
from moiety_wire.trace_events import Event, Phases

PROVIDER = "moiety"
QUEUE, PREFILL, DECODE = "engine.queue", "engine.prefill", "engine.decode"
TRANSFER = "engine.transfer"  # KV transfer of a prompt from its prefill engine
ATTEMPT = "engine.attempt"  # attempt without phases, since the engine refused or was lost

Attributes = dict[str, Attribute]


def spans_of(record: RequestRecord, row: UsageRow, verdict: SamplingDecision, ended_ns: int) -> list[Span]:
    """Return all spans, the request's own first."""
    own = _own_span(record, row, verdict, ended_ns)
    return [own, *_phases(record, own), *_at_engines(record, own)]


def _own_span(record: RequestRecord, row: UsageRow, verdict: SamplingDecision, ended_ns: int) -> Span:
    trace = record.trace
    start_ns = trace.marks[0][1]
    return Span(
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_id=trace.parent.span_id if trace.parent is not None else None,
        name=f"{record.operation} {record.served_model}",
        kind=SpanKind.SERVER,
        start_ns=start_ns,
        end_ns=max(start_ns, ended_ns),
        attributes=_attributes(_of_generation(record) | _of_end(record, row) | {"moiety.kept_for": verdict.value}),
        events=tuple(
            SpanEvent(
                "moiety.failed_over",
                failover.unix_ns,
                {
                    "moiety.reason": failover.cause,
                    "moiety.engine.from": failover.from_address,
                    "moiety.engine.to": failover.to_address,
                    "moiety.relayed_tokens": failover.num_relayed,
                },
            )
            for failover in record.failovers
        )
        + tuple(
            SpanEvent(
                "moiety.route_fallback",
                fallback.unix_ns,
                {"moiety.reason": fallback.cause, "gen_ai.request.model": fallback.model},
            )
            for fallback in record.route_fallbacks
        ),
        error=record.error_code,
    )


def _of_generation(record: RequestRecord) -> dict[str, Attribute | None]:
    """Return the attributes of the request."""
    generation = record.generation
    found: dict[str, Attribute | None] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": PROVIDER,
        "url.path": record.endpoint,
    }
    if generation is None:
        return found
    asked = record.route or record.served_model
    found["gen_ai.request.model"] = asked if asked != UNKNOWN_MODEL else None
    found["moiety.route"] = record.route
    found["moiety.run"] = None if record.agent_run is None else record.agent_run.name
    found["moiety.guardrails"] = tuple(f"{name}={outcome}" for name, outcome in record.guardrails.items()) or None
    found["moiety.route.downgraded"] = record.was_downgraded_by_budget or None
    found["gen_ai.embeddings.dimension.count"] = generation.dimensions
    if not generation.embed:
        sampling = generation.sampling
        found |= {
            "gen_ai.request.choice.count": generation.num_choices,
            "gen_ai.request.max_tokens": generation.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.seed": sampling.seed,
        }
    return found


def _of_end(record: RequestRecord, row: UsageRow) -> dict[str, Attribute | None]:
    """Return the attributes of the outcome. The counts are those of the usage row."""
    return {
        "gen_ai.response.id": record.request_id,
        "gen_ai.response.model": record.served_model if record.reached_engine else None,
        "gen_ai.response.finish_reasons": tuple(record.finish_reasons) or None,
        "gen_ai.usage.input_tokens": row.prompt_tokens,
        "gen_ai.usage.output_tokens": row.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": row.cached_tokens,
        "http.response.status_code": row.http_status,
        "error.type": row.error_code,
        "moiety.tenant_id": row.tenant_id,
        "moiety.project_id": row.project_id,
        "moiety.key_id": row.key_id,
        "moiety.request_id": record.request_id,
        "moiety.service_class": row.service_class,
        "moiety.service_class.asked": record.chosen.name if record.chosen else None,
        "moiety.admission": record.admission_outcome or None,
        "moiety.reason": record.admission_reason or None,
        "moiety.ttft_ms": row.ttft_ms,
        "moiety.preemptions": row.num_preemptions,
        "moiety.recomputed_tokens": record.num_recomputed_tokens,
        "moiety.speculative_tokens": record.num_speculative_tokens or None,
        "moiety.failovers": len(record.failovers) or None,
        "moiety.slo_attained": row.slo_attained,
        "moiety.cost_nanodollars": row.cost_nanodollars,
        "moiety.outcome": record.outcome,
    }


def _phases(record: RequestRecord, own: Span) -> Iterator[Span]:
    """Yield the gateway's phases, without gaps. An error belongs to the last phase before SETTLE."""
    marks, common = [*record.trace.marks, (None, own.end_ns)], _common(record)
    broken = next((phase for phase, _ in reversed(record.trace.marks) if phase is not Phase.SETTLE), None)
    for (phase, start_ns), (_, end_ns) in pairwise(marks):
        assert phase is not None, "only the end has no phase"
        error = own.error if phase is broken and record.outcome not in COMPLETED else None
        yield _child(own, phase.value, start_ns, end_ns, common, error=error)


def _at_engines(record: RequestRecord, own: Span) -> Iterator[Span]:
    """Yield the spans of each sequence in order. After a failover, each engine's span links to the one before."""
    last: dict[int, Link] = {}
    for attempt in record.attempts:
        spans = list(_of_attempt(record, attempt, own, last.get(attempt.sequence)))
        last[attempt.sequence] = Link(own.trace_id, spans[-1].span_id)
        yield from spans


def _of_attempt(record: RequestRecord, attempt: EngineAttempt, own: Span, before: Link | None) -> Iterator[Span]:
    attributes = _common(record) | {"moiety.engine": attempt.address, "moiety.sequence": attempt.sequence}
    if attempt.num_resumed_tokens:
        attributes["moiety.resumed_tokens"] = attempt.num_resumed_tokens
    links = () if before is None else (before,)
    finished = attempt.stream.finished
    if finished is None or attempt.error_code is not None:
        end_ns = attempt.failed_ns or own.end_ns
        if attempt.upstream is not None:
            attributes |= {"moiety.upstream.status": attempt.upstream.status}
            attributes |= {"moiety.upstream.message": attempt.upstream.message}
        yield _child(own, ATTEMPT, attempt.submitted_ns, end_ns, attributes, links=links, error=attempt.error_code)
        return
    shift_ns = _shift_ns(finished.phases, attempt.submitted_ns, own.end_ns)
    if shift_ns:
        attributes["moiety.clock_shift_ns"] = shift_ns
    notes = notes_of(finished)
    yield from steps_of(notes, attempt.address, shift_ns)
    if notes.num_seen > len(notes.steps):  # a long sequence does not keep all steps
        attributes["moiety.steps_seen"] = notes.num_seen
    phases = list(_engine_phases(finished))
    ran_in: dict[str, list[Link]] = {}
    for step in notes.steps:
        ran_in.setdefault(_phase_of(step.end_unix_ns - 1, phases), []).append(link_to(step))
    for name, start_ns, end_ns in phases:
        events = tuple(
            SpanEvent(f"moiety.{event.kind.value}", event.unix_ns + shift_ns, _of_event(event))
            for event in finished.events
            if _phase_of(event.unix_ns, phases) == name
        )
        more = attributes | _of_engine_phase(name, finished)
        begin, end = start_ns + shift_ns, end_ns + shift_ns
        yield _child(own, name, begin, end, more, events=events, links=(*links, *ran_in.get(name, ())))
        links = ()


def _engine_phases(finished: Finished) -> Iterator[tuple[str, int, int]]:
    """Yield the phases that the sequence reached.

    A sequence with received KV was prefilled elsewhere, and a sequence with PREFILL_DONE is decoded elsewhere.
    """
    phases, arrival = finished.phases, finished.arrival
    received, scheduled, first, ended = (
        phases.received_unix_ns,
        phases.scheduled_unix_ns,
        phases.first_token_unix_ns,
        phases.finished_unix_ns,
    )
    if arrival is not None:
        yield TRANSFER, arrival.begun_unix_ns, arrival.ended_unix_ns
    yield QUEUE, received, scheduled or ended
    if arrival is not None and scheduled:
        yield DECODE, scheduled, ended
        return
    if scheduled:
        yield PREFILL, scheduled, first or ended
    if first and finished.reason is not FinishReason.PREFILL_DONE:
        yield DECODE, first, ended


def _shift_ns(phases: Phases, submitted_ns: int, ended_ns: int) -> int:
    """Return the correction of the engine's clock, so that no span begins before its cause. It is 0 on one machine."""
    if phases.received_unix_ns < submitted_ns:
        return submitted_ns - phases.received_unix_ns
    if phases.finished_unix_ns > ended_ns:
        return max(ended_ns - phases.finished_unix_ns, submitted_ns - phases.received_unix_ns)
    return 0


def _of_engine_phase(name: str, finished: Finished) -> Attributes:
    if name == PREFILL:
        return {
            "gen_ai.usage.input_tokens": finished.num_prompt_tokens,
            "moiety.cached_tokens": finished.num_cached_tokens,
        }
    if name == TRANSFER and finished.arrival is not None:
        arrival = finished.arrival
        return {
            "moiety.transfer.tokens": arrival.num_tokens,
            "moiety.transfer.bytes": arrival.num_bytes,
            "moiety.transfer.way": arrival.transport,
        }
    if name == DECODE:
        decoded: Attributes = {
            "gen_ai.usage.output_tokens": finished.num_output_tokens,
            "gen_ai.response.finish_reasons": (finished.reason.value,),
            "moiety.recomputed_tokens": finished.num_recomputed_tokens,
        }
        if finished.num_drafted_tokens:
            decoded["moiety.drafted_tokens"] = finished.num_drafted_tokens
            decoded["moiety.accepted_tokens"] = finished.num_accepted_tokens
        return decoded
    return {}


def _phase_of(unix_ns: int, phases: list[tuple[str, int, int]]) -> str:
    """Return the phase at a time: the last one that had begun, except the transfer."""
    return next((name for name, start_ns, _ in reversed(phases) if start_ns <= unix_ns and name != TRANSFER), QUEUE)


def _of_event(event: Event) -> Attributes:
    attributes: Attributes = {"moiety.reason": event.reason.value}
    if event.other:
        attributes["moiety.beneficiary"] = event.other
    return attributes


def _common(record: RequestRecord) -> Attributes:
    """Return the attributes of every span of the request, so that each span can be found by itself."""
    return {
        "moiety.tenant_id": record.principal.tenant_id,
        "moiety.service_class": record.service_class,
        "moiety.request_id": record.request_id,
    }


def _child(
    own: Span,
    name: str,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, Attribute],
    *,
    events: tuple[SpanEvent, ...] = (),
    links: tuple[Link, ...] = (),
    error: str | None = None,
) -> Span:
    if error is not None:
        attributes = {**attributes, "error.type": error}
    span_id, end_ns = random_hex(8), max(start_ns, end_ns)
    kind = SpanKind.INTERNAL
    return Span(own.trace_id, span_id, own.span_id, name, kind, start_ns, end_ns, attributes, events, links, error)


def _attributes(attributes: Mapping[str, Attribute | None]) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}

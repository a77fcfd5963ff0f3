"""Spans of the engine steps that a request ran in.

Each step is a trace of its own, since it serves many requests of several tenants. It has no data about them. The
requests link to it.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
from opentelemetry.trace import SpanKind

from moiety_platform.traces.span import Attribute, Link, Span
from moiety_wire.codec import decode_notes
from moiety_wire.errors import UndecodableMessage
from moiety_wire.messages import Finished
from moiety_wire.trace_events import StepNote, StepNotes

STEP = "engine.step"
NO_STEP_NOTES = StepNotes(0, [])

log = structlog.get_logger(__name__)


def notes_of(finished: Finished) -> StepNotes:
    """Return the engine's step notes for the sequence.

    Notes that cannot be decoded, as from another release, are dropped.
    """
    if not finished.steps:
        return NO_STEP_NOTES
    try:
        return decode_notes(finished.steps)
    except UndecodableMessage as exc:
        log.warning(
            "steps_undecodable",
            reason=str(exc),
            advice="run the same release of gateway and engine; the trace has no steps",
        )
        return NO_STEP_NOTES


def link_to(step: StepNote) -> Link:
    trace_id = step.trace_id.hex()
    return Link(trace_id, trace_id[-16:])


def steps_of(notes: StepNotes, engine: str, shift_ns: int) -> Iterator[Span]:
    """Yield the step spans. `shift_ns` corrects the engine's clock."""
    for step in notes.steps:
        trace_id, span_id = link_to(step)
        begin_ns, end_ns = step.begin_unix_ns + shift_ns, step.end_unix_ns + shift_ns
        attributes = _attributes(step) | {"moiety.engine": engine}
        yield Span(trace_id, span_id, None, STEP, SpanKind.INTERNAL, min(begin_ns, end_ns), end_ns, attributes)


def _attributes(step: StepNote) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "moiety.step.number": step.number,
        "moiety.step.decodes": step.num_decodes,
        "moiety.step.prefills": step.num_prefills,
        "moiety.step.prefill_tokens": step.num_prefill_tokens,
        "moiety.step.preempted": step.num_preempted,
        "moiety.step.output_tokens": step.num_output_tokens,
        "moiety.step.waiting": step.num_waiting,
        "moiety.step.kv_blocks_used": step.kv_blocks_used,
        "moiety.step.kv_blocks_total": step.kv_blocks_total,
        "moiety.step.classes": tuple(f"{count} {name}" for name, count in sorted(step.classes.items())),
    }
    known = {
        "moiety.step.predicted_s": step.predicted_s,
        "moiety.step.active_experts": step.active_experts,
        "moiety.step.balancedness": step.balancedness,
    }
    return attributes | {name: value for name, value in known.items() if value is not None}

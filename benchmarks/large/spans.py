"""Traces modelled on real ones: stored traces are written again under other ids and times."""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from sqlalchemy import select

from moiety_platform.db.session import Database
from moiety_platform.trace_store.models import SpanRecord, TraceRecord
from moiety_platform.usage.row import UsageRow

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SPAN = [column.name for column in SpanRecord.__table__.columns]
_TRACE = [column.name for column in TraceRecord.__table__.columns]


@dataclass(frozen=True)
class Model:
    """One real trace: the request's row and all of its spans, their JSON as text with placeholders for ids."""

    trace: dict[str, Any]
    spans: list[dict[str, Any]]
    start_ns: int
    duration_ms: float

    @classmethod
    def of(cls, trace: TraceRecord, spans: list[SpanRecord]) -> Model:
        root = next(span for span in spans if span.span_id == trace.span_id)
        marks = {trace.tenant_id: "@tenant", trace.request_id: "@request", trace.trace_id: "@trace"}
        for name, mark in (("moiety.project_id", "@project"), ("moiety.key_id", "@key")):
            marks[str(root.attributes[name])] = mark
        marks |= {span.span_id: f"@span{number}@" for number, span in enumerate(spans)}

        def marked(value: Any) -> str:
            text = json.dumps(value)
            for known, mark in marks.items():
                text = text.replace(known, mark)
            return text

        made = []
        for span in spans:
            row = {name: getattr(span, name) for name in _SPAN}
            row |= {name: marked(row[name]) for name in ("attributes", "links")}
            made.append(row)
        found = {name: getattr(trace, name) for name in _TRACE}
        return cls(found, made, root.start_ns, max(0.001, trace.duration_ms))


async def read_models(database: Database) -> dict[str, list[Model]]:
    """Return all traces of the store, by the outcome of their requests."""
    async with database.read() as session:
        traces = list(await session.scalars(select(TraceRecord)))
        spans: defaultdict[str, list[SpanRecord]] = defaultdict(list)
        for span in await session.scalars(select(SpanRecord).order_by(SpanRecord.start_ns)):
            spans[span.trace_id].append(span)
    found: defaultdict[str, list[Model]] = defaultdict(list)
    for trace in traces:
        found[trace.outcome].append(Model.of(trace, spans[trace.trace_id]))
    return found


def copies(
    rows: Iterable[UsageRow], models: dict[str, list[Model]], rng: Random
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return rows of `traces` and of `spans` for these requests.

    Each is like a real one that ended in the same way, as long as the request took. Requests without such a real one
    are left out.
    """
    traces: list[tuple[Any, ...]] = []
    spans: list[tuple[Any, ...]] = []
    for row in rows:
        if row.outcome in models:
            trace, made = _copy(row, rng.choice(models[row.outcome]))
            traces.append(trace)
            spans += made
    return traces, spans


def _copy(row: UsageRow, model: Model) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    trace_id = secrets.token_hex(16)
    ids = secrets.token_hex(8 * len(model.spans))
    span_ids = [ids[16 * number : 16 * number + 16] for number in range(len(model.spans))]
    known = {span["span_id"]: new for span, new in zip(model.spans, span_ids, strict=True)}
    start_ns = (row.started_at - _EPOCH) // timedelta(microseconds=1) * 1000
    stored_ms = start_ns // 10**6 + int(row.duration_ms)
    stretch = row.duration_ms / model.duration_ms
    texts = {"@tenant": row.tenant_id, "@request": row.request_id, "@trace": trace_id}
    texts |= {"@project": row.project_id, "@key": row.key_id}

    def moved(unix_ns: int) -> int:
        return start_ns + int((unix_ns - model.start_ns) * stretch)

    def filled(text: str) -> str:
        if "@" in text:
            for mark, value in texts.items():
                text = text.replace(mark, value)
        if "@span" in text:
            for number, span_id in enumerate(span_ids):
                text = text.replace(f"@span{number}@", span_id)
        return text

    made = []
    for span, span_id in zip(model.spans, span_ids, strict=True):
        start, end = moved(span["start_ns"]), moved(span["end_ns"])
        events = [{**event, "unix_ns": moved(event["unix_ns"])} for event in span["events"]]
        changed = {
            "trace_id": trace_id, "span_id": span_id, "parent_id": known.get(span["parent_id"]),
            "tenant_id": row.tenant_id, "start_ns": start, "end_ns": max(start, end),
            "attributes": filled(span["attributes"]), "events": json.dumps(events) if events else "[]",
            "links": filled(span["links"]), "stored_ms": stored_ms,
        }  # fmt: skip
        made.append(tuple({**span, **changed}.values()))
    trace = {
        **model.trace, "trace_id": trace_id, "span_id": known[model.trace["span_id"]], "request_id": row.request_id,
        "tenant_id": row.tenant_id, "service_class": row.service_class, "started_at": row.started_at,
        "duration_ms": row.duration_ms, "stored_ms": stored_ms,
    }  # fmt: skip
    return tuple(trace.values()), made

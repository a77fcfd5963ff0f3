"""Traces as frames: found requests, and for one request its spans, their events and the steps of its engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import moment, short_address

Spans = Sequence[Mapping[str, Any]]

GATEWAY, ENGINE, FAILED, OTHER = "gateway", "engine", "error", "other services"
SHARED = ("moiety.tenant_id", "moiety.service_class", "moiety.request_id")  # on every span of a request
INDENT = "\N{MIDDLE DOT} "  # Markdown would drop plain spaces

FOUND = ("at", "tenant", "class", "operation", "model", "outcome", "duration_ms", "reason", "kept_for", "request_id")
BARS = ("row", "label", "who", "start_ms", "end_ms", "duration_ms", "attributes", "service", "span_id")
EVENTS = ("row", "label", "span", "at_ms", "event", "reason", "attributes")
STEPS = (
    *("number", "start_ms", "end_ms", "took_ms", "predicted_ms", "decodes", "prefills", "prefill_tokens", "preempted"),
    *("output_tokens", "waiting", "kv_used", "active_experts", "balancedness", "classes", "engine"),
)


def found_frame(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per request with a kept trace. `names` maps tenant ids."""
    lines = [
        {
            "at": moment(row["started_at"]),
            "tenant": names.get(row["tenant_id"], row["tenant_id"]),
            "class": row["service_class"],
            "reason": row["error_code"] or row["reason"],
            "trace_id": row["trace_id"],
            **{name: row[name] for name in ("operation", "model", "outcome", "duration_ms", "kept_for", "request_id")},
        }
        for row in rows
    ]
    return pd.DataFrame(lines, columns=[*FOUND, "trace_id"])


def requests_of(spans: Spans) -> list[Mapping[str, Any]]:
    """Return the spans of requests; a trace that a client has begun may have several."""
    return [span for span in spans if "moiety.outcome" in span["attributes"]]


def bars_frame(spans: Spans) -> pd.DataFrame:
    """Return one row per span, each below its parent, in the order of time."""
    ordered = list(_in_order(spans))
    begin_ns = origin_ns(spans)
    lines = [
        {
            "row": row,
            "label": INDENT * depth + _label(span),
            "who": _who(span),
            "start_ms": (span["start_ns"] - begin_ns) / 1e6,
            "end_ms": (span["end_ns"] - begin_ns) / 1e6,
            "duration_ms": (span["end_ns"] - span["start_ns"]) / 1e6,
            "attributes": attributes_in_words(span["attributes"]),
            "service": span["service"],
            "span_id": span["span_id"],
        }
        for row, (depth, span) in enumerate(ordered)
    ]
    return pd.DataFrame(lines, columns=list(BARS))


def events_frame(spans: Spans) -> pd.DataFrame:
    """Return one row per event, on the row of its span, in the order of time."""
    begin_ns = origin_ns(spans)
    lines = [
        {
            "row": row,
            "label": INDENT * depth + _label(span),
            "span": _label(span),
            "at_ms": (event["unix_ns"] - begin_ns) / 1e6,
            "event": event["name"].removeprefix("moiety.").replace("_", " "),
            "reason": event["attributes"].get("moiety.reason", ""),
            "attributes": attributes_in_words(event["attributes"]),
        }
        for row, (depth, span) in enumerate(_in_order(spans))
        for event in span["events"]
    ]
    return pd.DataFrame(lines, columns=list(EVENTS)).sort_values("at_ms", kind="stable")


def steps_frame(linked: Spans, begin_ns: int) -> pd.DataFrame:
    """Return one row per engine step, in the order of time; ms count from `begin_ns`."""
    spans = [one["span"] for one in linked if one["span"]["name"] == "engine.step"]
    lines = [_step(span, begin_ns) for span in spans]
    return pd.DataFrame(lines, columns=list(STEPS)).sort_values("start_ms", kind="stable")


def origin_ns(spans: Spans) -> int:
    """Return the start time of a trace."""
    return min(int(span["start_ns"]) for span in spans)


def attributes_in_words(attributes: Mapping[str, Any]) -> str:
    """Return the attributes of a span or an event without those that every span has."""
    return "\n".join(f"{name}: {_show(value)}" for name, value in attributes.items() if name not in SHARED)


def _step(span: Mapping[str, Any], begin_ns: int) -> dict[str, Any]:
    of = {name.removeprefix("moiety."): value for name, value in span["attributes"].items()}
    predicted_s, blocks = of.get("step.predicted_s"), of.get("step.kv_blocks_total")
    return {
        "number": of["step.number"],
        "start_ms": (span["start_ns"] - begin_ns) / 1e6,
        "end_ms": (span["end_ns"] - begin_ns) / 1e6,
        "took_ms": (span["end_ns"] - span["start_ns"]) / 1e6,
        "predicted_ms": None if predicted_s is None else predicted_s * 1000,
        "decodes": of["step.decodes"],
        "prefills": of["step.prefills"],
        "prefill_tokens": of["step.prefill_tokens"],
        "preempted": of["step.preempted"],
        "output_tokens": of["step.output_tokens"],
        "waiting": of["step.waiting"],
        "kv_used": of["step.kv_blocks_used"] / blocks if blocks else None,
        "active_experts": of.get("step.active_experts"),
        "balancedness": of.get("step.balancedness"),
        "classes": ", ".join(of.get("step.classes", ())),
        "engine": short_address(of["engine"]),
    }


def _in_order(spans: Spans) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each span with its depth; a span whose parent is missing, such as a client's, is a root."""
    known = {span["span_id"] for span in spans}
    under: dict[str | None, list[Mapping[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: (span["start_ns"], -span["end_ns"])):
        parent_id = span["parent_id"] if span["parent_id"] in known else None
        under.setdefault(parent_id, []).append(span)
    waiting = [(0, span) for span in reversed(under.get(None, []))]
    while waiting:
        depth, span = waiting.pop()
        yield depth, span
        waiting += [(depth + 1, child) for child in reversed(under.pop(span["span_id"], []))]


def _label(span: Mapping[str, Any]) -> str:
    """Return the span's name, and for one of several sequences its number."""
    sequence = span["attributes"].get("moiety.sequence")
    return f"{span['name']} #{sequence + 1}" if sequence else str(span["name"])


def _who(span: Mapping[str, Any]) -> str:
    if span["status"] == "error":
        return FAILED
    if span["name"].startswith("engine."):
        return ENGINE
    return GATEWAY if "moiety.request_id" in span["attributes"] else OTHER


def _show(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

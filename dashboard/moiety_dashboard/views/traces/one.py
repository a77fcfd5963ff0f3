"""One trace: its spans over time, their events, and the batches that the request ran in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import colours, panels, session, waterfall
from moiety_dashboard.client import AdminClient, Answer, ApiRefused, path_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import dollars, milliseconds, short
from moiety_dashboard.frames import traces as frames
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.traces.kept import kept

MAX_BARS = 160
ENDED = {"stop": "at its end or a stop sequence", "length": "at its token limit",
         "content_filter": "by a content filter"}  # fmt: skip
TRACE_ID = re.compile("[0-9a-f]{32}")


def draw(client: AdminClient, trace_id: str, names: Mapping[str, str]) -> None:
    answer = find(client, trace_id)
    if answer is None:
        panels.head("Traces", "One trace")
        leave()
        st.info(f"No trace with this id is stored. A trace is stored about two seconds after the answer. {kept()}")
        return
    spans, linked = answer.data["spans"], answer.data["linked"]
    requests = frames.requests_of(spans)
    panels.head(requests[0]["name"] if requests else spans[0]["name"], f"Trace {trace_id}")
    leave()
    for number, request in enumerate(requests):
        draw_request(request, names, answer, number)
    bars = frames.bars_frame(spans)
    draw_spans(answer, bars, frames.events_frame(spans))
    draw_steps(answer, spans, linked)
    with panels.panel("Spans", "all spans with their attributes", [answer], key="all spans", frame=bars):
        panels.table(bars, span_columns(), "", max_rows=14)


def find(client: AdminClient, trace_id: str) -> Answer | None:
    """Return the trace that an address names, whatever its text; None if there is none."""
    if TRACE_ID.fullmatch(trace_id) is None:
        return None
    try:
        return client.get(path_of("traces", trace_id))
    except ApiRefused as exc:
        if exc.code != "trace_not_found":
            raise
        return None


def leave() -> None:
    if st.button("All traces", icon=":material/arrow_back:"):
        st.query_params.clear()
        st.rerun()


def draw_request(request: Mapping[str, Any], names: Mapping[str, str], answer: Answer, number: int) -> None:
    """Draw the attributes of the request's own span."""
    of = request["attributes"]
    cached = of.get("gen_ai.usage.cache_read.input_tokens")
    attained, service_class = of.get("moiety.slo_attained"), of.get("moiety.service_class", "")
    panels.tiles(
        [
            Tile("Duration", milliseconds((request["end_ns"] - request["start_ns"]) / 1e6), "at the gateway"),
            Tile("TTFT", milliseconds(of.get("moiety.ttft_ms")), "from arrival at the gateway"),
            Tile("Outcome", str(of["moiety.outcome"]), ending_of(of)),
            Tile("Tokens", f"{short(of.get('gen_ai.usage.output_tokens'))} out",
                 f"{short(of.get('gen_ai.usage.input_tokens'))} in, {short(cached)} cached"),
            Tile("SLO", "none" if attained is None else "attained" if attained else "missed",
                 f"{short(of.get('moiety.preemptions', 0))} preemptions"),
            Tile("Cost", dollars(of.get("moiety.cost_nanodollars")), f"kept: {of.get('moiety.kept_for', '–')}"),
        ],
        [answer],
        key=f"figures {number}",
    )  # fmt: skip
    row = st.container(horizontal=True, vertical_alignment="center")
    tenant, request_id = of.get("moiety.tenant_id", ""), of.get("moiety.request_id", "")
    row.caption(
        f"Tenant **{as_text(names.get(tenant, tenant))}** · request {as_text(request_id)}",
        width="content",
    )
    with row.container(width="content"):
        panels.chips(colours.of_classes([service_class]) if service_class else {})


def ending_of(of: Mapping[str, Any]) -> str:
    """Return what a request's attributes say of its end beside its outcome."""
    outcome = str(of["moiety.outcome"])
    reasons = [one for one in of.get("gen_ai.response.finish_reasons", ()) if one != outcome]
    return str(of.get("error.type") or ", ".join(reasons) or ENDED.get(outcome, "no response"))


def draw_spans(answer: Answer, bars: pd.DataFrame, events: pd.DataFrame) -> None:
    note = "duration of each span; hover for its attributes"
    with panels.panel("Waterfall", note, [answer], key="spans", frame=bars):
        if len(bars) > MAX_BARS:
            st.caption(f"The first {MAX_BARS} of {len(bars)} spans. The CSV contains all of them.")
        shown = bars.head(MAX_BARS)
        there = events[events["row"].isin(shown["row"])]
        st.altair_chart(waterfall.waterfall(shown, there), width="stretch", key="waterfall")
    if not events.empty:
        with panels.panel("Events", "scheduling and routing decisions", [answer], key="events", frame=events):
            panels.table(events, event_columns(), "")


def draw_steps(answer: Answer, spans: frames.Spans, linked: frames.Spans) -> None:
    steps = frames.steps_frame(linked, frames.origin_ns(spans))
    if not any(span["name"] == "engine.prefill" for span in spans):
        return  # the request entered no batch
    note = "sampled engine steps of this request, a few per second"
    with panels.panel("Batch", note, [answer], key="steps", frame=steps):
        until_ms = (max(span["end_ns"] for span in spans) - frames.origin_ns(spans)) / 1e6
        panels.draw(lambda: waterfall.steps(steps, until_ms), steps, why_no_steps(), "steps chart")
        if not steps.empty:
            panels.table(steps, step_columns(steps), "")


NO_STEPS = "No engine step was sampled for this request. An engine samples a few steps per second."
HOW = "Raise the number with `moiety engine --traced-steps-per-s`."
SHARED = "Tenants share the steps of an engine, so users of one tenant do not see them."


def why_no_steps() -> str:
    """Return why a trace has no engine steps, and to whom that may change it, how."""
    return SHARED if session.is_of_one_tenant() else f"{NO_STEPS}{session.advice(HOW, session.DEPLOYS)}"


def event_columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "at_ms": column.NumberColumn("Time, ms", format="%.2f", width="small"),
        "event": column.TextColumn("Event"),
        "reason": column.TextColumn("Reason", width="medium"),
        "span": column.TextColumn("Span"),
        "attributes": column.TextColumn("Attributes", width="large"),
    }


def span_columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "label": column.TextColumn("Span", width=190),
        "start_ms": column.NumberColumn("Start, ms", format="%.3f", width="small"),
        "duration_ms": column.NumberColumn("Duration, ms", format="%.3f", width=105),
        "service": column.TextColumn("Service"),
        "attributes": column.TextColumn("Attributes", width="large"),
    }


def step_columns(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the columns without those that have no data."""
    column = st.column_config
    shown = {
        "number": panels.count_column("Step"),
        "start_ms": column.NumberColumn("Start, ms", format="%.1f"),
        "took_ms": column.NumberColumn("Duration, ms", format="%.2f"),
        "predicted_ms": column.NumberColumn(
            "Predicted, ms", format="%.2f", help="Predicted by the scheduler before the step"
        ),
        "decodes": column.NumberColumn("Decodes", help="Sequences that generated a token"),
        "prefills": column.NumberColumn("Prefills", help="Sequences with a prompt chunk in the step"),
        "prefill_tokens": column.NumberColumn("Prompt tokens"),
        "output_tokens": column.NumberColumn("Output tokens"),
        "preempted": column.NumberColumn("Preempted"),
        "waiting": column.NumberColumn("Waiting", help="Requests in the queue"),
        "kv_used": column.ProgressColumn("KV usage", min_value=0.0, max_value=1.0, format="percent"),
        "active_experts": column.NumberColumn(
            "Active experts", format="%.1f", help="Of a layer in a step, mean of about two seconds"
        ),
        "balancedness": column.NumberColumn(
            "Balancedness", format="percent", help="Mean expert load divided by the largest, in the same time"
        ),
        "classes": column.TextColumn("Classes"),
        "engine": column.TextColumn("Engine", width=205),
    }
    return {name: one for name, one in shown.items() if frame[name].notna().any() or name not in OPTIONAL}


OPTIONAL = ("predicted_ms", "kv_used", "active_experts", "balancedness")

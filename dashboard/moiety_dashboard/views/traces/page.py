"""Traces: a search over the stored requests, and one trace if the address names it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import colours, panels, session
from moiety_dashboard.client import AdminClient
from moiety_dashboard.frames.traces import found_frame
from moiety_dashboard.page import Page
from moiety_dashboard.views.tenants.names import names_of
from moiety_dashboard.views.traces import one
from moiety_dashboard.views.traces.kept import KEPT, TRACE
from moiety_dashboard.views.windows import DAY, HOUR, MINUTE

LIMIT = 100
SHOWN = "traces as drawn"
PICKED = "trace picked"
POSITION = "traces from"
WINDOWS = {"15 min": 15 * MINUTE, "1 h": HOUR, "24 h": DAY, "7 d": 7 * DAY}
OUTCOMES = {
    "stop": "stop", "length": "length", "content_filter": "content filter", "disconnected": "client disconnected",
    "rejected": "rejected", "failed": "failed",
}  # fmt: skip
REASONS = (
    *("failed", "slo_missed", "preempted", "failed_over", "first", "rate"),  # reasons why a trace is kept
    *("accepted_late", "predicted_late", "kv_peak", "queue_full", "tenant_queue_full", "shed"),  # the scheduler's
    *("quota_exceeded", "engine_failed", "engine_refused", "model_not_found"),  # error codes
)
KEYS = ("trace window", "trace tenant", "trace class", "trace outcome", "trace reason", "trace min", "trace request")


def draw(page: Page) -> None:
    for key in KEYS:  # the search stays as it is while one of the traces is open
        if key in st.session_state:
            st.session_state[key] = st.session_state[key]
    picked = st.session_state.pop(PICKED, None)
    if picked is not None:
        st.query_params[TRACE] = picked
    trace_id = st.query_params.get(TRACE)
    with page.asking() as client:
        if trace_id:
            one.draw(client, trace_id.strip().lower(), names_of(client))
            return
        panels.head("Traces", "Requests with a stored trace, newest first; click a row to open its trace")
        names = names_of(client)
        draw_found(client, choose(client, names), names)


def choose(client: AdminClient, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the search as the API's parameters."""
    classes = [terms["name"] for terms in client.get("/classes").data["data"]]
    columns = st.columns([1.2, 2, 1.6, 1.6, 2, 1.2, 2.4])
    window = columns[0].selectbox("Window", list(WINDOWS), 1, key="trace window")
    tenant = None
    if not session.is_of_one_tenant():
        tenants = sorted((one for one in names if one.startswith("ten_")), key=lambda one: names[one])
        tenant = _choice(columns[1], "Tenant", tenants, "any", names)
    found = {
        "tenant_id": tenant,
        "service_class": _choice(columns[2], "Class", classes, "any"),
        "outcome": _choice(columns[3], "Outcome", list(OUTCOMES), "any", OUTCOMES),
        "reason": _choice(columns[4], "Reason", list(REASONS), "any", more=True),
    }
    least = columns[5].number_input("Min duration, ms", 0, value=None, step=100, placeholder="0", key="trace min")
    request_id = columns[6].text_input("Request", key="trace request", placeholder="chatcmpl-…").strip()
    since = datetime.now(UTC) - WINDOWS[window]
    return {**found, "min_ms": least or None, "request_id": request_id or None, "since": since.isoformat()}


def _choice(
    container: Any,
    label: str,
    options: list[str],
    empty: str,
    names: Mapping[str, str] | None = None,
    *,
    more: bool = False,
) -> str | None:
    shown: str | None = container.selectbox(
        label, options, None, format_func=lambda one: (names or {}).get(one, one), placeholder=empty,
        key=f"trace {label.lower()}", accept_new_options=more,
        help="A scheduler's reason, an error code, or the reason why the trace was kept" if more else None,
    )  # fmt: skip
    return shown


def draw_found(client: AdminClient, trace_filter: Mapping[str, Any], names: Mapping[str, str]) -> None:
    searched = {name: value for name, value in trace_filter.items() if name != "since"}
    position = st.session_state.get(POSITION)
    cursor = position[1] if position is not None and position[0] == searched else None
    answer = client.get("/traces", limit=LIMIT, cursor=cursor, **trace_filter)
    frame = found_frame(answer.data["data"], names)
    classes = colours.of_classes(sorted(set(frame["class"])))
    with panels.panel("Requests", "with a stored trace", [answer], key="traces", frame=frame):
        st.session_state[SHOWN] = list(frame["trace_id"])
        panels.table(
            frame, columns(frame), EMPTY, classes=classes, states=colours.OUTCOMES, max_rows=16, on_pick=pick
        )  # fmt: skip
    turn(answer.data["next_cursor"], cursor, searched)


EMPTY = f"No stored trace matches. Send a request, choose a longer window, or remove a filter. {KEPT}"


def pick(row: int) -> None:
    """Open a row of the table as it was drawn when it was clicked."""
    shown: list[str] = st.session_state.get(SHOWN, [])
    if row < len(shown):
        st.session_state[PICKED] = shown[row]


def columns(frame: pd.DataFrame) -> dict[str, Any]:
    column = st.column_config
    longest = float(frame["duration_ms"].max()) if len(frame) else 1.0
    shown: dict[str, Any] = {
        "at": panels.time_column("Started", "YYYY-MM-DD HH:mm:ss.SSS", width=180),
        "tenant": "Tenant",
        "class": "Class",
        "operation": column.TextColumn("Operation", width="small"),
        "model": "Model",
        "outcome": column.TextColumn("Outcome", width="small"),
        "duration_ms": column.ProgressColumn("Duration, ms", min_value=0, max_value=longest, format="%.0f"),
        "reason": column.TextColumn("Reason", help="Error code, or the scheduler's reason"),
        "kept_for": column.TextColumn("Kept because", help="Why the trace was kept"),
        "request_id": column.TextColumn("Request", width="medium"),
    }
    if session.is_of_one_tenant():
        del shown["tenant"]
    return shown


def turn(older: str | None, cursor: str | None, searched: Mapping[str, Any]) -> None:
    """Draw the buttons to older traces, back, and to new ones."""
    left, right, _ = st.columns([1, 1, 3])
    if left.button("Older", icon=":material/chevron_left:", disabled=older is None, width="stretch"):
        st.session_state[POSITION] = (searched, older)
        st.rerun()
    label = "Newest" if cursor is not None else "Refresh"
    if right.button(label, icon=":material/refresh:", width="stretch", key="traces newest"):
        st.session_state.pop(POSITION, None)
        st.rerun()

"""Traces: a search over the stored requests, and one trace if the address names it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient
from moiety_dashboard.frames.traces import found_frame
from moiety_dashboard.page import Page
from moiety_dashboard.views import searches
from moiety_dashboard.views.searches import OUTCOMES, StoredSearch
from moiety_dashboard.views.tenants.names import names_of
from moiety_dashboard.views.traces import one
from moiety_dashboard.views.traces.kept import TRACE, kept
from moiety_dashboard.views.windows import DAY, HOUR, MINUTE

WINDOWS = {"15 min": 15 * MINUTE, "1 h": HOUR, "24 h": DAY, "7 d": 7 * DAY}
REASONS = (
    *("failed", "slo_missed", "preempted", "failed_over", "first", "rate"),  # reasons why a trace is kept
    *("accepted_late", "predicted_late", "kv_peak", "queue_full", "tenant_queue_full", "shed"),  # the scheduler's
    *("quota_exceeded", "engine_failed", "engine_refused", "model_not_found"),  # error codes
)
REASON_HELP = "A scheduler's reason, an error code, or the reason why the trace was kept"
SEARCH = StoredSearch("trace", "/traces", "trace_id", limit=100)
EMPTY = "No stored trace matches. Send a request, choose a longer window, or remove a filter."
KEYS = ("trace window", "trace tenant", "trace class", "trace outcome", "trace reason", "trace min", "trace request")


def draw(page: Page) -> None:
    for key in KEYS:  # the search stays as it is while one of the traces is open
        if key in st.session_state:
            st.session_state[key] = st.session_state[key]
    if SEARCH.picked is not None:
        st.query_params[TRACE] = SEARCH.picked
        SEARCH.forget_picked()
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
    places = searches.places_of((1, 1, 1, 1), (1, 3) if session.is_of_one_tenant() else (1, 1, 2))
    window = next(places).selectbox("Window", list(WINDOWS), 1, key="trace window")
    found = {
        "tenant_id": searches.choose_tenant(SEARCH, places, names),
        "service_class": searches.choose(SEARCH, next(places), "Class", classes),
        "outcome": searches.choose(SEARCH, next(places), "Outcome", list(OUTCOMES), OUTCOMES),
        "reason": searches.choose(SEARCH, next(places), "Reason", list(REASONS), more=True, help_text=REASON_HELP),
        "min_ms": searches.enter_least_duration(SEARCH, next(places)),
        "request_id": searches.enter(SEARCH, next(places), "Request", "chatcmpl-…"),
    }
    return {**found, "since": (datetime.now(UTC) - WINDOWS[window]).isoformat()}


def draw_found(client: AdminClient, filters: Mapping[str, Any], names: Mapping[str, str]) -> None:
    answer = SEARCH.ask(client, filters)
    frame = found_frame(answer.data["data"], names)
    with panels.panel("Requests", "with a stored trace", [answer], key="traces", frame=frame):
        searches.draw_table(SEARCH, frame, columns(frame), f"{EMPTY} {kept()}")
    searches.draw_buttons(SEARCH, answer.data["next_cursor"], filters)


def columns(frame: pd.DataFrame) -> dict[str, Any]:
    column = st.column_config
    longest = float(frame["duration_ms"].max()) if len(frame) else 1.0
    shown: dict[str, Any] = {
        "at": panels.time_column("Started", "YYYY-MM-DD HH:mm:ss.SSS", width=180),
        "tenant": "Tenant",
        "class": "Class",
        "operation": column.TextColumn("Operation"),
        "model": "Model",
        "outcome": column.TextColumn("Outcome"),
        "duration_ms": column.ProgressColumn("Duration, ms", min_value=0, max_value=longest, format="%,.0f"),
        "reason": column.TextColumn("Reason", help="Error code, or the scheduler's reason"),
        "kept_for": column.TextColumn("Kept because", help="Why the trace was kept"),
        "request_id": "Request",
    }
    return shown

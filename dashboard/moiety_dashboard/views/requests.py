"""Requests: a search in the log of all requests, and the details of one with a link to its trace."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, Answer, ApiRefused, path_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.frames.requests import fields_frame, requests_frame
from moiety_dashboard.page import Page
from moiety_dashboard.views import searches
from moiety_dashboard.views.searches import OUTCOMES, StoredSearch
from moiety_dashboard.views.tenants.names import names_of
from moiety_dashboard.views.traces.kept import TRACE
from moiety_dashboard.views.windows import DAY, HOUR, MINUTE

TRACES = "traces"
WINDOWS = {"15 min": 15 * MINUTE, "1 h": HOUR, "24 h": DAY, "7 d": 7 * DAY, "30 d": 30 * DAY}
STATUSES = ("2xx", "4xx", "5xx", "400", "403", "404", "408", "413", "429", "499", "500", "502", "503", "504")
SLO_STATES = {"attained": "attained", "missed": "missed", "none": "does not apply"}
SEARCH = StoredSearch("log", "/requests", "request_id", limit=200)
EMPTY = "No request matches. Choose a longer window, or remove a filter."


def draw(page: Page) -> None:
    panels.head("Requests", "Every authenticated request, newest first; click a row for its details")
    with page.asking() as client:
        names = names_of(client)
        request_id = st.text_input("Request id", key="log request", placeholder="chatcmpl-…, of any time").strip()
        if request_id:
            draw_one(page, client, request_id, names)
            return
        draw_found(client, choose(client, names), names)
        if SEARCH.picked is not None:
            draw_one(page, client, SEARCH.picked, names)


def choose(client: AdminClient, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the search as the API's parameters."""
    classes = [terms["name"] for terms in client.get("/classes").data["data"]]
    row = (1, 1, 1, 1)
    places = searches.places_of(row, row, row)
    window = next(places).selectbox("Window", list(WINDOWS), 1, key="log window")
    found = {
        "tenant_id": searches.choose_tenant(SEARCH, places, names),
        "model": searches.enter(SEARCH, next(places), "Model", "name of a model"),
        "service_class": searches.choose(SEARCH, next(places), "Class", classes),
        "outcome": searches.choose(SEARCH, next(places), "Outcome", list(OUTCOMES), OUTCOMES),
        "status": searches.choose(SEARCH, next(places), "Status", list(STATUSES), more=True),
        "slo": searches.choose(SEARCH, next(places), "SLO", list(SLO_STATES), SLO_STATES),
        "min_ms": searches.enter_least_duration(SEARCH, next(places)),
        "error_code": searches.enter(SEARCH, next(places), "Error code", "quota_exceeded"),
        "route": searches.enter(SEARCH, next(places), "Route", "name of a route"),
        "end_user": searches.enter(SEARCH, next(places), "End user", "ann"),
        "tag": searches.enter(SEARCH, next(places), "Tag", "team=search"),
    }
    return {**found, "since": (datetime.now(UTC) - WINDOWS[window]).isoformat()}


def draw_found(client: AdminClient, filters: Mapping[str, Any], names: Mapping[str, str]) -> None:
    answer = SEARCH.ask(client, filters)
    frame = requests_frame(answer.data["data"], names)
    with panels.panel("Requests", "all, not sampled; the CSV has all columns", [answer], key="requests", frame=frame):
        searches.draw_table(SEARCH, frame, columns(), EMPTY)
    searches.draw_buttons(SEARCH, answer.data["next_cursor"], filters)


def get_or_explain(client: AdminClient, path: str) -> Answer | None:
    """Return the API's answer; if the API refuses it, draw the reason and return None."""
    try:
        return client.get(path)
    except ApiRefused as exc:
        st.info(as_text(exc), icon=":material/search_off:")
        return None


def draw_one(page: Page, client: AdminClient, request_id: str, names: Mapping[str, str]) -> None:
    """Draw the details of one request."""
    answer = get_or_explain(client, path_of("requests", request_id))
    if answer is None:
        return
    found = answer.data
    frame = fields_frame(found, names, session.zone())
    with panels.panel(f"Request {request_id}", "as its usage row has it", [answer], key="request", frame=frame):
        if found["has_trace"] and TRACES in page.others:
            icon = ":material/account_tree:"
            st.page_link(page.others[TRACES], label="Open trace", icon=icon, query_params={TRACE: found["trace_id"]})
        elif found["has_trace"] is None:
            st.caption("The trace store does not answer.")
        else:
            st.caption("The trace of this request was not sampled, or is deleted.")
        panels.table(
            frame, {"field": st.column_config.TextColumn("Field", width=260), "value": "Value"}, EMPTY, max_rows=40
        )
    if session.may("request_contents.read"):
        draw_content(client, request_id)


def draw_content(client: AdminClient, request_id: str) -> None:
    """Draw the text of a request and of its answers on request, since the audit log records who reads it."""
    if not st.button("Show the content", icon=":material/visibility:", key=f"content {request_id}"):
        st.caption("Contents are logged only if your tenant has opted in. The audit log records who reads them.")
        return
    answer = get_or_explain(client, path_of("request-contents", request_id))
    if answer is None:
        return
    found = answer.data
    texts = [("request", found["input"]), *((f"answer {n}", text) for n, text in enumerate(found["outputs"], 1))]
    frame = pd.DataFrame(texts, columns=["part", "text"])
    note = "without secrets and card numbers" + (", cut" if found["is_cut"] else "")
    with panels.panel("Content", note, [answer], key="content", frame=frame):
        for part, text in texts:
            st.caption(as_text(part))
            st.code(text, language=None, wrap_lines=True)


def columns() -> dict[str, Any]:
    column = st.column_config
    shown: dict[str, Any] = {
        "at": panels.time_column("Started", "YYYY-MM-DD HH:mm:ss.SSS", width=180),
        "tenant": "Tenant",
        "model": "Model",
        "class": "Class",
        "outcome": column.TextColumn("Outcome"),
        "status_code": column.NumberColumn("Status", format="%d", width="small"),
        "error": "Error",
        "prompt_tokens": panels.count_column("Prompt", tooltip="Prompt tokens"),
        "output_tokens": panels.count_column("Output", tooltip="Output tokens"),
        "cost": column.NumberColumn("Cost, $", format="%.6f"),
        "ttft_ms": column.NumberColumn("TTFT, ms", format="%,.0f"),
        "duration_ms": column.NumberColumn("Duration, ms", format="%,.0f"),
        "slo": "SLO",
        "trace": column.CheckboxColumn("Trace", help="Whether its trace is stored"),
        "key": "Key",
        "route": "Route",
        "end_user": "End user",
        "tags": "Tags",
        "request_id": "Request",
    }
    return shown

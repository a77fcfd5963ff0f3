"""Agent runs with their budgets, and the requests of one run as one trace."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, path_of
from moiety_dashboard.escaping import as_text, show_unseen
from moiety_dashboard.frames.runs import run_bars_frame, runs_frame
from moiety_dashboard.page import Page
from moiety_dashboard.views.tenants.names import names_of
from moiety_dashboard.waterfall import waterfall

CHOSEN = "chosen run"
MAX_BARS = 100  # the CSV contains all requests
NONE = "No run yet. A request begins one with the header `x-moiety-run`."
NO_REQUEST = "No request of this run was admitted."


def draw(page: Page) -> None:
    panels.head("Agent runs", "Requests that share a budget, a deadline and a stop switch")
    with page.asking() as client:
        answer = client.get("/runs")
        frame = runs_frame(answer.data["data"], names_of(client), datetime.now(UTC))
        with panels.panel("Runs", "newest first", [answer], key="runs", frame=frame):
            panels.table(frame, columns(), NONE, max_rows=12)
        if frame.empty:
            return
        labels = {
            run_id: f"{show_unseen(name)} ({show_unseen(tenant)})"
            for run_id, name, tenant in frame[["id", "name", "tenant"]].to_numpy()
        }
        chosen = st.selectbox("Run", list(labels), format_func=lambda run_id: labels[run_id], key=CHOSEN)
        draw_trace(client, chosen)


def draw_trace(client: AdminClient, run_id: str) -> None:
    """Draw the requests of a run over time, and the button that stops it."""
    path = path_of("runs", run_id)
    answer = client.get(f"{path}/trace")
    run, bars = answer.data["run"], run_bars_frame(answer.data["requests"])
    note = "in their order" + (f"; the first {MAX_BARS} are drawn" if len(bars) > MAX_BARS else "")
    with panels.panel("Requests of the run", note, [answer], key="run-trace", frame=bars):
        if bars.empty:
            st.caption(NO_REQUEST)
        else:
            st.altair_chart(waterfall(bars.head(MAX_BARS), pd.DataFrame(), "run"), width="stretch", key="run-waterfall")
    if run["status"] == "active" and session.may("runs.write") and st.button("Stop", icon=":material/stop_circle:"):
        panels.ask_first(
            f"Stop the run **{as_text(run['name'])}**? Its open requests end, and later ones are refused.",
            "Stop the run",
            lambda: client.change("POST", f"{path}/stop"),
            "The run is stopped.",
        )


def columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "name": "Run",
        "tenant": "Tenant",
        "status": column.TextColumn("Status", help="expired: its deadline has passed"),
        "requests": panels.count_column("Requests"),
        "tokens": panels.count_column("Tokens"),
        "token_share": column.NumberColumn("Token budget used", format="percent"),
        "cost": column.NumberColumn("Cost", format="dollar", step=0.0001),
        "cost_share": column.NumberColumn("Cost budget used", format="percent"),
        "deadline": panels.time_column("Deadline", "YYYY-MM-DD HH:mm:ss"),
        "created": panels.time_column("Began", "YYYY-MM-DD HH:mm:ss"),
        "id": column.TextColumn("Id", width="medium"),
    }

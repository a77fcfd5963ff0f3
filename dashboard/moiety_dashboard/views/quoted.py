"""Panel of requests with a quote: how exact the predictions were, which guarantees were missed, and the credits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import streamlit as st

from moiety_dashboard import colours, panels
from moiety_dashboard.client import AdminClient
from moiety_dashboard.frames.quotes import quotes_frame
from moiety_dashboard.views.windows import DAY

NONE = "No request with a quote in the last 24 h. Clients get quotes with `POST /v1/quote`."


def draw_quotes(client: AdminClient, tenant_id: str | None = None) -> None:
    """Draw the quotes of the last 24 hours by class, of one tenant or of all."""
    since = (datetime.now(UTC) - DAY).isoformat()
    answer = client.get("/usage/quotes", since=since, tenant_id=tenant_id)
    frame = quotes_frame(answer.data["data"])
    title, note = "Quotes: actual against predicted", "last 24 h, by class; 1.00 is exact, above 1 is later"
    with panels.panel(title, note, [answer], key="quotes", frame=frame):
        panels.table(frame, columns(), NONE, classes=colours.of_classes(frame["class"]))


def columns() -> dict[str, Any]:
    column = st.column_config
    times = {
        f"{name}_{part}": column.NumberColumn(f"{label} ÷ predicted, {shown}", format="%.2f")
        for name, label in (("ttft", "TTFT"), ("duration", "Duration"))
        for part, shown in (("median", "median"), ("p90", "p90"))
    }
    return {
        "class": "Class",
        "requests": panels.count_column("Quoted requests"),
        "met": column.NumberColumn("Guarantees met", format="percent"),
        "missed": panels.count_column("Missed"),
        "reasons": column.TextColumn("Missed by", help="ttft: late first token; finish: late last token; failed"),
        "credit": column.NumberColumn("Credits", format="dollar", step=0.0001),
        **times,
    }

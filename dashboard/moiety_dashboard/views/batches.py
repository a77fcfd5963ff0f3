"""Batches of all tenants with their progress."""

from __future__ import annotations

from typing import Any

import streamlit as st

from moiety_dashboard import colours, panels
from moiety_dashboard.client import AdminClient
from moiety_dashboard.formatting import percent, ratio, short
from moiety_dashboard.frames.catalogue import batches_frame
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.tenants.names import names_of

OPEN = ("validating", "in progress", "finalizing", "cancelling")
STATES = {
    "completed": colours.GOOD,
    "in progress": colours.DECODE,
    "validating": colours.WARN,
    "finalizing": colours.WARN,
    "cancelling": colours.WARN,
    "failed": colours.BAD,
    "expired": colours.BAD,
    "cancelled": colours.NEUTRAL,
}
NONE = "No batch was created. A client creates one with `POST /v1/batches`."


def draw(page: Page) -> None:
    page.live(draw_live)


def draw_live(client: AdminClient) -> None:
    panels.head("Batches", "The newest 500 batches, and how many of their lines have ended")
    answer = client.get("/batches")
    frame = batches_frame(answer.data["data"], names_of(client))
    is_open = frame["status"].isin(OPEN)
    running = frame[is_open]
    done = int(running["completed"].sum() + running["failed"].sum())
    figures = [
        Tile("Open", f"{len(running)}", f"of {len(frame)}"),
        Tile("Progress", percent(ratio(done, int(running["lines"].sum()))), "of the lines of open batches"),
        Tile("Failed lines", short(int(frame["failed"].sum())), "of all listed batches"),
        Tile("Tokens", short(int(frame["tokens"].sum())), "of all listed batches"),
    ]
    panels.tiles(figures, [answer], key="batch figures")
    note = "newest first" + ("; there are more" if answer.data["truncated"] else "")
    with panels.panel("Batches", note, [answer], key="batches", frame=frame):
        panels.table(frame, columns(), NONE, states=STATES, max_rows=16)


def columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "status": "Status",
        "progress": column.ProgressColumn("Progress", min_value=0.0, max_value=1.0, format="percent", width=130),
        "lines": panels.count_column("Lines"),
        "completed": panels.count_column("Completed"),
        "failed": panels.count_column("Failed"),
        "tenant": "Tenant",
        "tokens": panels.count_column("Tokens", tooltip="Prompt and output tokens"),
        "created": panels.time_column("Created", "YYYY-MM-DD HH:mm"),
        "ended": panels.time_column("Ended", "YYYY-MM-DD HH:mm", width=140),
        "expires": panels.time_column("Expires", "YYYY-MM-DD HH:mm"),
        "endpoint": "Endpoint",
        "project": "Project",
        "id": column.TextColumn("Id", width="medium"),
    }

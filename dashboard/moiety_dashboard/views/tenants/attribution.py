"""Usage of one tenant by its end users and tags: the largest ones, and their tokens and cost by day."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import charts, colours, panels
from moiety_dashboard.client import AdminClient, Answer
from moiety_dashboard.escaping import as_text
from moiety_dashboard.frames.attribution import attribution_frame, slots_frame, tag_names
from moiety_dashboard.views.columns import token_columns
from moiety_dashboard.views.windows import DAY, HOUR, Window

WINDOWS = (Window("24 h", DAY, HOUR), Window("7 d", 7 * DAY, DAY), Window("30 d", 30 * DAY, DAY))
END_USER = "end_user"
TAG = "tag:"
NUM_DRAWN = 5  # end users or tag values in a chart
NUM_SAMPLED = 500  # newest requests in which the names of tags are looked for
READ = "read usage by end user"
FRESH_S = 60.0


def draw(client: AdminClient, tenant: Mapping[str, Any]) -> None:
    left, right = st.columns([3, 2], vertical_alignment="bottom")
    labels = [window.label for window in WINDOWS]
    shown = left.segmented_control("Time", labels, default=labels[1], key="attribution time", format_func=as_text)
    window = next((window for window in WINDOWS if window.label == shown), WINDOWS[1])
    span = window.span()
    sample = client.get("/usage/requests", tenant_id=tenant["id"], limit=NUM_SAMPLED, since=span.since.isoformat())
    groupings = [END_USER, *(f"{TAG}{name}" for name in tag_names(sample.data["data"]))]
    grouping = right.selectbox("Group by", groupings, format_func=_label, key=f"grouping {tenant['id']}")
    total, by_hour, frame, slots = _read(client, tenant["id"], window, grouping)
    what, slot = _label(grouping), "hour" if window.step < DAY else "day, in UTC"
    note = f"last {window.label}; of requests whose rows are kept"
    none = (
        "No usage in this time. Clients name their end users in `safety_identifier` or `user`, and give tags in the "
        "header `x-moiety-tags`."
    )
    with panels.panel(f"Usage by {what}", note, [total, sample], key="attribution", frame=frame):
        panels.table(frame, _columns(grouping), none)
    inks = dict(zip(frame["name"].dropna(), colours.TENANTS, strict=False))
    left, right = st.columns(2)
    note = f"the {NUM_DRAWN} with most tokens, by {slot}"
    empty = f"No request with {as_text(what)} in this time."
    with left, panels.panel("Tokens", note, by_hour or [total], key="attributed tokens", frame=slots):
        figure = charts.Figure("tokens", "tokens")
        panels.draw(lambda: charts.stacked(slots, figure, "name", inks, span), slots, empty, "attributed tokens chart")
    with right, panels.panel("Cost", note, by_hour or [total], key="attributed cost", frame=slots):
        figure = charts.Figure("cost", "dollars", ",.4~f")
        panels.draw(lambda: charts.stacked(slots, figure, "name", inks, span), slots, empty, "attributed cost chart")


def _read(
    client: AdminClient, tenant_id: str, window: Window, grouping: str
) -> tuple[Answer, list[Answer], pd.DataFrame, pd.DataFrame]:
    """Return the sums by the grouping, and those by the hour or the day of its largest values, with a frame of each.

    The gateway reads many requests for them, all of the time for sums by the hour, so they are asked for once a minute
    at most.
    """
    key = tenant_id, window.label, grouping
    known: tuple[Any, float, Any] | None = st.session_state.get(READ)
    if known is not None and known[0] == key and time.monotonic() - known[1] < FRESH_S:
        return known[2]  # type: ignore[no-any-return]
    span = window.span(datetime.now(UTC))
    given = {"tenant_id": tenant_id, "since": span.since.isoformat(), "until": span.until.isoformat()}
    total = client.get("/usage", group_by=grouping, **given)
    frame = attribution_frame(total.data["data"], grouping)
    drawn = list(frame["name"].dropna().head(NUM_DRAWN))
    tag = grouping.removeprefix(TAG)
    only = [{END_USER: name} if grouping == END_USER else {"tag": f"{tag}={name}"} for name in drawn]
    slot = "hour" if window.step < DAY else "day"
    answers = client.get_all([("/usage", {"group_by": slot, **one, **given}) for one in only])
    by_slot = dict(zip(drawn, answers, strict=True))
    slots = slots_frame({name: answer.data["data"] for name, answer in by_slot.items()}, span.since, window.step)
    found = total, list(by_slot.values()), frame, slots
    st.session_state[READ] = key, time.monotonic(), found
    return found


def _label(grouping: str) -> str:
    return "end user" if grouping == END_USER else f"tag {grouping.removeprefix(TAG)}"


def _columns(grouping: str) -> dict[str, Any]:
    column = st.column_config
    return {
        "name": column.TextColumn(
            "End user" if grouping == END_USER else "Tag value", help="A dash stands for requests without one"
        ),
        "share": column.ProgressColumn("Token share", min_value=0.0, max_value=1.0, format="percent"),
        "requests": panels.count_column("Requests"),
        "failed": panels.count_column("Failed"),
        **token_columns(),
        "cost": column.NumberColumn("Cost", format="dollar"),
    }

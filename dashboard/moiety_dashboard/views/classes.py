"""Service classes: SLO attainment and editable terms."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import streamlit as st

from moiety_dashboard import charts, colours, panels, samples, session
from moiety_dashboard.client import AdminClient, path_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.frames.spot import spot_frame
from moiety_dashboard.page import Page
from moiety_dashboard.views.columns import class_columns
from moiety_dashboard.views.overview import EMPTY, classes_of_hour
from moiety_dashboard.views.quoted import draw_quotes
from moiety_dashboard.views.windows import HOUR, LIVE
from moiety_dashboard.views.windows import series as read_series

SEEN = "class etag"
TIMES = {
    "ttft_s": ("TTFT SLO, s", "Empty: no TTFT SLO. TTFT or completion time is required."),
    "completion_s": ("Completion time SLO, s", "Empty: no completion time SLO."),
    "tpot_s": ("TPOT SLO, s", "Requires a TTFT SLO."),
}
SPOT = {
    "spot_floor_percent": ("Lowest spot price, %", "Of the class's price, which follows idle capacity. Empty: fixed."),
    "spot_ceiling_percent": ("Highest spot price, %", "Of the class's price. Empty: the price is fixed."),
}
OVERLOAD = {"reject": "reject (429)", "queue": "queue", "downgrade": "downgrade to a lower class"}


def draw(page: Page) -> None:
    page.live(draw_live)
    with page.asking() as client:
        classes = client.get("/classes").data["data"]
        st.subheader("SLO and scheduling settings", anchor=False)
        if not session.may("classes.write"):
            st.caption("Your role can view classes. Owners and operators can change them.")
            return
        names = [terms["name"] for terms in classes]
        left, right = st.columns([3, 1], vertical_alignment="bottom")
        chosen = left.segmented_control(
            "Class to edit", names, default=names[0], key="edited class", format_func=as_text
        )
        if right.button("New class", icon=":material/add:", width="stretch"):
            create(client, names)
        if chosen:
            edit(client, chosen, names)


def draw_live(client: AdminClient) -> None:
    panels.head("Service classes", "SLO attainment, queues and settings of each class")
    classes = client.get("/classes")
    engines = client.get("/engines") if session.may("engines.read") else None
    if engines is not None:
        samples.watch(engines.data["data"])
    sums = client.get("/usage/minutes", group_by="service_class", step=60, since=(datetime.now(UTC) - HOUR).isoformat())
    inks = colours.of_classes(terms["name"] for terms in classes.data["data"])
    frame = classes_of_hour(classes, sums, engines)
    answers = [sums, classes, *([engines] if engines else [])]
    note = "last 1 h" + (", and now" if engines else "")
    with panels.panel("SLO attainment", note, answers, key="slo attainment", frame=frame):
        panels.table(frame, columns(with_load=engines is not None), "No service class is defined.", classes=inks)
    draw_quotes(client)
    window = LIVE[1]
    span = window.span()
    answer, over_time = read_series(client, window, span, ["service_class"])
    if any(terms["spot_floor_percent"] is not None for terms in classes.data["data"]):
        draw_spot(client, inks, span)
    left, right = st.columns(2)
    note = "by class, last 1 h, 1 min resolution"
    with left, panels.panel("Mean queue time", note, [answer], key="queue", frame=over_time):
        waited = over_time[over_time["queue_ms"].notna()]
        figure = charts.Figure("queue_ms", "ms")
        panels.draw(lambda: charts.lines(waited, figure, "class", inks, span), waited, EMPTY, "queue chart")
    with right, panels.panel("Preemptions per minute", note, [answer], key="preemptions", frame=over_time):
        stopped = over_time[over_time["preemptions"] > 0]
        figure = charts.Figure("preemptions", "preemptions/min")
        none = "No request was preempted in this time range."
        panels.draw(lambda: charts.stacked(stopped, figure, "class", inks, span), stopped, none, "preemptions chart")


def draw_spot(client: AdminClient, inks: Mapping[str, str], span: charts.Span) -> None:
    """Draw the published prices of spot classes."""
    answer = client.get("/spot-prices", since=span.since.isoformat(), until=span.until.isoformat())
    prices = spot_frame(answer.data["data"], span.step)
    note = "% of the class's price, mean over models, last 1 h"
    with panels.panel("Spot price", note, [answer], key="spot price", frame=prices):
        figure = charts.Figure("percent", "% of the price")
        none = "No request, quote or list has asked for a spot price in this time range."
        panels.draw(
            lambda: charts.lines(prices, figure, "class", inks, span, width_px=charts.WHOLE_PX),
            prices,
            none,
            "spot price chart",
        )


def columns(*, with_load: bool) -> dict[str, Any]:
    column = st.column_config
    since_start = "Total of all engines since they started"
    more: dict[str, Any] = {
        "predicted_ms": column.NumberColumn(
            "Predicted TTFT, ms", format="%,.0f", help="Predicted TTFT of an empty prompt that arrives now"
        ),
        "rejections": panels.count_column("Rejected, 1 h"),
        "downgraded": panels.count_column("Downgraded", tooltip=since_start),
    }
    if not with_load:
        del more["predicted_ms"], more["downgraded"]
    shown = class_columns(with_load=with_load) | more
    del shown["requests"]  # they are on the overview
    if session.may("classes.write"):
        del shown["slo"]  # it is editable below
    return shown


def edit(client: AdminClient, name: str, names: list[str]) -> None:
    """Edit the terms of one class; the change is refused if another user has changed them meanwhile."""
    answer = client.get(path_of("classes", name))
    seen = st.session_state.setdefault(SEEN, {})
    seen.setdefault(name, answer.etag)
    if seen[name] != answer.etag:
        st.warning(
            "Another user has changed this class since you opened it. Reload it before you save.",
            icon=":material/sync_problem:",
        )
        if st.button("Reload"):
            seen.pop(name)
            st.rerun()
    with st.form(f"edit {name}", border=True):
        terms = terms_form(answer.data, names)
        save, _ = st.columns([1, 3])
        if save.form_submit_button("Save", type="primary", width="stretch"):
            change(client, name, terms, seen)
    if not answer.data["shipped"] and st.button(f"Delete {as_text(name)}", icon=":material/delete:"):
        panels.ask_first(
            f"Delete the class **{as_text(name)}**? This fails while a tenant or another class uses it.",
            "Delete",
            lambda: client.change("DELETE", path_of("classes", name), if_match=seen[name]),
            f"Class {name} deleted.",
        )


def change(client: AdminClient, name: str, terms: Mapping[str, Any], seen: dict[str, str | None]) -> None:
    done = f"Class {name} saved; it applies from the next request."
    if (
        panels.attempt(lambda: client.change("PATCH", path_of("classes", name), terms, if_match=seen[name]), done)
        is not None
    ):
        seen.pop(name)
        st.rerun()


def terms_form(terms: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return all of a class's terms but its name, from the fields of a form."""
    edited: dict[str, Any] = {}
    first, second, third = st.columns(3)
    for name, (label, description) in TIMES.items():
        edited[name] = first.number_input(
            label, 0.001, value=terms[name], format="%.3f", placeholder="none", help=description
        )
    edited["ttft_per_1k_s"] = first.number_input(
        "Additional TTFT per 1,000 prompt tokens, s", 0.0, value=float(terms["ttft_per_1k_s"]), format="%.3f"
    )
    edited["max_queue_s"] = second.number_input("Maximum queue time, s", 0.001, value=float(terms["max_queue_s"]))
    edited["rank"] = second.number_input("Rank (0 is highest)", 0, 1000, int(terms["rank"]))
    edited["weight"] = second.number_input("Weight", 0.001, 1000.0, float(terms["weight"]))
    edited["preemptible"] = second.checkbox(
        "Preemptible", terms["preemptible"], help="Requests of higher classes can preempt those of this class"
    )
    edited["price_factor"] = third.number_input("Price factor", 0.0, 100.0, float(terms["price_factor"]))
    for name, (label, description) in SPOT.items():
        edited[name] = third.number_input(label, 1, 100, terms[name], placeholder="fixed", help=description)
    edited["credit_percent"] = third.number_input(
        "Credit for a missed guarantee, % of the cost", 0, 100, int(terms["credit_percent"])
    )
    actions = list(OVERLOAD)
    left, right = st.columns(2)
    edited["on_overload"] = left.selectbox(
        "When the SLO cannot be attained",
        actions,
        actions.index(terms["on_overload"]),
        format_func=lambda action: OVERLOAD[action],
    )
    lower = [None, *(name for name in names if name != terms.get("name"))]
    at = lower.index(terms["downgrade_to"]) if terms["downgrade_to"] in lower else 0
    edited["downgrade_to"] = right.selectbox("Downgrade to", lower, at, format_func=lambda name: name or "none")
    return edited


@st.dialog("New class", width="large")
def create(client: AdminClient, names: list[str]) -> None:
    usual = {
        "ttft_s": 2.0, "completion_s": None, "tpot_s": None, "ttft_per_1k_s": 0.2, "max_queue_s": 30.0, "rank": 1,
        "weight": 1.0, "price_factor": 1.0, "credit_percent": 0, "preemptible": True, "on_overload": "reject",
        "downgrade_to": None, "spot_floor_percent": None, "spot_ceiling_percent": None,
    }  # fmt: skip
    with st.form("new class", border=False):
        name = st.text_input("Name", placeholder="gold", help="Lower-case letters, digits and hyphens")
        terms = terms_form(usual, names)
        if st.form_submit_button("Create class", type="primary"):
            body = {"name": name, **terms}
            if panels.attempt(lambda: client.change("POST", "/classes", body), f"Class {name} created.") is not None:
                st.rerun()

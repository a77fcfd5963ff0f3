"""Service classes: SLO attainment and editable terms."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import streamlit as st

from moiety_dashboard import charts, colours, panels, samples, session
from moiety_dashboard.client import AdminClient, path_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.page import Page
from moiety_dashboard.views.columns import class_columns
from moiety_dashboard.views.overview import EMPTY, classes_of_hour
from moiety_dashboard.views.windows import HOUR, LIVE
from moiety_dashboard.views.windows import series as read_series

SEEN = "class etag"
TIMES = {
    "ttft_s": ("First token within, s", "Empty: no promise on the first token. One of this and the next is needed."),
    "completion_s": ("Whole answer within, s", "Empty: no promise on the whole answer."),
    "tpot_s": ("Then a token every, s", "Needs a promise on the first token."),
}
OVERLOAD = {"reject": "refuse it (429)", "queue": "let it wait", "downgrade": "serve it in a lower class"}


def draw(page: Page) -> None:
    page.live(draw_live)
    with page.asking() as client:
        classes = client.get("/classes").data["data"]
        st.subheader("Terms", anchor=False)
        if not session.may("classes.write"):
            st.caption("Your role reads classes; owners and operators change them.")
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
    panels.head("SLA classes", "What each class promises, and how the promise is kept")
    classes = client.get("/classes")
    engines = client.get("/engines") if session.may("engines.read") else None
    if engines is not None:
        samples.watch(engines.data["data"])
    sums = client.get("/usage/minutes", group_by="service_class", step=60, since=(datetime.now(UTC) - HOUR).isoformat())
    inks = colours.of_classes(terms["name"] for terms in classes.data["data"])
    frame = classes_of_hour(classes, sums, engines)
    answers = [sums, classes, *([engines] if engines else [])]
    with panels.panel("How promises are kept", "the last hour, and now", answers, key="kept", frame=frame):
        panels.table(frame, columns(), "There is no class.", classes=inks)
    window = LIVE[1]
    span = window.span()
    answer, over_time = read_series(client, window, span, ["service_class"])
    left, right = st.columns(2)
    note = "by class, last 1 h, 1 min a slot"
    with left, panels.panel("Mean time in the queue", note, [answer], key="queue", frame=over_time):
        waited = over_time[over_time["queue_ms"].notna()]
        figure = charts.Figure("queue_ms", "ms")
        panels.draw(lambda: charts.lines(waited, figure, "class", inks, span), waited, EMPTY, "queue chart")
    with right, panels.panel("Preemptions per minute", note, [answer], key="preemptions", frame=over_time):
        stopped = over_time[over_time["preemptions"] > 0]
        figure = charts.Figure("preemptions", "preemptions/min")
        none = "Nobody was preempted in this time."
        panels.draw(lambda: charts.stacked(stopped, figure, "class", inks, span), stopped, none, "preemptions chart")


def columns() -> dict[str, Any]:
    column = st.column_config
    since_start = "By all engines since they started"
    more = {
        "predicted_s": column.NumberColumn(
            "Would wait, s", format="%.2f", help="Predicted time to first token of an empty prompt that arrives now"
        ),
        "rejections": column.NumberColumn("Refused, 1 h", format="localized"),
        "downgraded": column.NumberColumn("Downgraded", format="localized", help=since_start),
    }
    shown = class_columns() | more
    del shown["promise"], shown["requests"]  # the one is editable below, the other is on the overview
    return shown


def edit(client: AdminClient, name: str, names: list[str]) -> None:
    """Edit the terms of one class; the change is refused if another user has changed them meanwhile."""
    answer = client.get(path_of("classes", name))
    seen = st.session_state.setdefault(SEEN, {})
    seen.setdefault(name, answer.etag)
    if seen[name] != answer.etag:
        st.warning("Somebody has changed this class since you opened it.", icon=":material/sync_problem:")
        if st.button("Show it as it is now"):
            seen.pop(name)
            st.rerun()
    with st.form(f"edit {name}", border=True):
        terms = ask_terms(answer.data, names)
        save, _ = st.columns([1, 3])
        if save.form_submit_button("Save", type="primary", width="stretch"):
            change(client, name, terms, seen)
    if not answer.data["shipped"] and st.button(f"Delete {as_text(name)}", icon=":material/delete:"):
        panels.ask_first(
            f"Delete the class **{as_text(name)}**? It is refused while a tenant or another class uses it.",
            "Delete",
            lambda: client.change("DELETE", path_of("classes", name), if_match=seen[name]),
            f"The class {name} is deleted.",
        )


def change(client: AdminClient, name: str, terms: Mapping[str, Any], seen: dict[str, str | None]) -> None:
    done = f"The class {name} is changed; it holds from the next request on."
    if (
        panels.attempt(lambda: client.change("PATCH", path_of("classes", name), terms, if_match=seen[name]), done)
        is not None
    ):
        seen.pop(name)
        st.rerun()


def ask_terms(terms: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return all of a class's terms but its name, from the fields of a form."""
    asked: dict[str, Any] = {}
    first, second, third = st.columns(3)
    for name, (label, says) in TIMES.items():
        asked[name] = first.number_input(label, 0.001, value=terms[name], format="%.3f", help=says)
    asked["ttft_per_1k_s"] = second.number_input(
        "More for each 1,000 prompt tokens, s", 0.0, value=float(terms["ttft_per_1k_s"]), format="%.3f"
    )
    asked["max_queue_s"] = second.number_input("Waits at most, s", 0.001, value=float(terms["max_queue_s"]))
    asked["rank"] = second.number_input("Rank (0 is best)", 0, 1000, int(terms["rank"]))
    asked["weight"] = third.number_input("Weight", 0.001, 1000.0, float(terms["weight"]))
    asked["price_factor"] = third.number_input("Price factor", 0.0, 100.0, float(terms["price_factor"]))
    asked["preemptible"] = third.checkbox("May be preempted for better classes", terms["preemptible"])
    actions = list(OVERLOAD)
    left, right = st.columns(2)
    asked["on_overload"] = left.selectbox(
        "When the promise cannot be kept",
        actions,
        actions.index(terms["on_overload"]),
        format_func=lambda action: OVERLOAD[action],
    )
    lower = [None, *(name for name in names if name != terms.get("name"))]
    at = lower.index(terms["downgrade_to"]) if terms["downgrade_to"] in lower else 0
    asked["downgrade_to"] = right.selectbox("… in which", lower, at, format_func=lambda name: name or "none")
    return asked


@st.dialog("New class", width="large")
def create(client: AdminClient, names: list[str]) -> None:
    usual = {
        "ttft_s": 2.0, "completion_s": None, "tpot_s": None, "ttft_per_1k_s": 0.2, "max_queue_s": 30.0, "rank": 1,
        "weight": 1.0, "price_factor": 1.0, "preemptible": True, "on_overload": "reject", "downgrade_to": None,
    }  # fmt: skip
    with st.form("new class", border=False):
        name = st.text_input("Name", placeholder="gold", help="Lower-case letters, digits and hyphens")
        terms = ask_terms(usual, names)
        if st.form_submit_button("Make it", type="primary"):
            body = {"name": name, **terms}
            if (
                panels.attempt(lambda: client.change("POST", "/classes", body), f"The class {name} is made.")
                is not None
            ):
                st.rerun()

"""The simulator: the last hour's traffic replayed under other settings."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import streamlit as st

from moiety_dashboard import charts, colours, panels, session
from moiety_dashboard.client import AdminClient, Answer, path_of
from moiety_dashboard.column_widths import width_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import percent, short
from moiety_dashboard.frames import fleet, series, simulations
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.classes import OVERLOAD
from moiety_dashboard.views.windows import HOUR

EDIT_ICON_PX = 28  # before the heading of a column
CLASSES = "classes"  # the page where settings are applied
MINUTES = {60: "last 1 h", 30: "last 30 min", 15: "last 15 min", 5: "last 5 min"}


def draw(page: Page) -> None:
    panels.head("Simulator", "Replay the last hour's traffic with other settings; serving is not affected")
    with page.asking() as client:
        known = client.get("/simulations")
        listed = known.data["data"]
        running = next((one for one in listed if one["state"] == "running"), None)
        if running is not None:
            draw_running(page, client, running)
        else:
            ask(client, known.data)
        ended = [one for one in listed if one["state"] != "running"]
        if ended:
            draw_ended(page, client, ended, known)


def draw_running(page: Page, client: AdminClient, running: Mapping[str, Any]) -> None:
    row = st.container(border=True, horizontal=True, vertical_alignment="center")
    with row:
        page.live(lambda live: draw_progress(live, running["id"]))
    if row.button("Cancel", icon=":material/stop_circle:"):
        path = path_of("simulations", running["id"])
        if panels.attempt(lambda: client.change("DELETE", path), "Simulation cancelled.") is not None:
            st.rerun()


def draw_progress(client: AdminClient, simulation_id: str) -> None:
    one = client.get(path_of("simulations", simulation_id)).data
    if one["state"] != "running":
        st.rerun()
    seconds = (datetime.now(UTC) - datetime.fromisoformat(one["created_at"])).total_seconds()
    st.markdown(
        f":material/hourglass_top: **Simulating** for {seconds:.0f} s: {as_text(simulations.in_words(one['settings']))}"
    )


def ask(client: AdminClient, known: Mapping[str, Any]) -> None:
    """Draw the form of a simulation."""
    classes = client.get("/classes").data["data"]
    engines = client.get("/engines").data["data"]
    with st.form("simulation", border=True):
        first, second, third = st.columns(3)
        body = ask_traffic(client, first, second) | ask_device(engines, known, third) | ask_replicas(engines, known)
        st.caption("Current class settings. Edit the values to simulate; nothing is applied. Times are in seconds.")
        columns = term_columns(classes)
        panels.write_column_names(columns.values())
        edited = st.data_editor(
            simulations.terms_frame(classes),
            column_config=columns,
            hide_index=True,
            width="stretch",
            placeholder="–",
        )
        if st.form_submit_button("Simulate", type="primary", icon=":material/science:"):
            body["classes"] = simulations.changes(classes, edited)
            started = "Simulation started."
            if panels.attempt(lambda: client.change("POST", "/simulations", body), started) is not None:
                st.rerun()


def ask_traffic(client: AdminClient, first: Any, second: Any) -> dict[str, Any]:
    """Return the arrivals: the gateway's own requests, or generated ones if there are none."""
    hour = client.get("/usage/minutes", step=60, since=(datetime.now(UTC) - HOUR).isoformat())
    totals = series.totals_of(hour.data["data"])
    served = totals["requests"] - totals["rejected"]
    if served < 2:
        st.info(
            "No request was served in the last hour, so the arrivals are generated. To replay your own traffic, send "
            "requests on the Playground page or with `moiety bench serve`.",
            icon=":material/casino:",
        )
    own = {f"recorded, {label}": {"minutes": minutes} for minutes, label in MINUTES.items()} if served >= 2 else {}
    sources = own | {label: {"generate": spec} for spec, label in simulations.GENERATED.items()}
    description = (
        f"{short(served)} requests were served in the last hour. A longer time range takes longer to simulate."
    )
    source = first.selectbox("Traffic", list(sources), help=description)
    times = second.number_input(
        "Load factor", 0.01, 100.0, 1.0, 0.25, help="Multiplies the arrival rate, bursts included"
    )
    return {**sources[source], "times": times}


def ask_device(engines: list[dict[str, Any]], known: Mapping[str, Any], column: Any) -> dict[str, Any]:
    """Return the step-time model."""
    devices = {("engine_id", one): label for one, label in simulations.learned(engines).items()}
    devices |= {("device", name): name for name in known["devices"]}
    description = "Learned by an engine while it served, or computed for a known model on a known device."
    field, name = column.selectbox(
        "Step time model", list(devices), format_func=lambda one: devices[one], help=description
    )
    return {field: name}


def ask_replicas(engines: list[dict[str, Any]], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the replicas. One of them is simulated, with its share of the requests."""
    ready = max(1, sum(fleet.engine_state(engine) == "ready" for engine in engines))
    first, second, last = st.columns(3)
    now = first.number_input("Current replicas", 1, 1000, ready)
    then = second.number_input("Simulated replicas", 1, 1000, ready)
    policy = last.selectbox("Simulated policy", known["policies"], help="Scheduling policy; the current one is moiety")
    return {"replicas_now": now, "replicas": then, "policy": policy}


def term_columns(classes: list[dict[str, Any]]) -> dict[str, Any]:
    column = st.column_config

    def seconds_column(label: str, description: str) -> Any:
        width = max(86, width_of([label]) + EDIT_ICON_PX)
        return column.NumberColumn(label, min_value=0.0, format="%,.4g", help=description, width=width)

    none = "Empty: no SLO"

    return {
        "class": column.TextColumn("Class", disabled=True, width=86),
        "rank": column.NumberColumn("Rank", min_value=0, max_value=1000, step=1, width=64, help="0 is highest"),
        "weight": column.NumberColumn("Weight", min_value=0.001, max_value=1000.0, format="%.3g", width=84),
        "ttft_s": seconds_column("TTFT", f"Time to first token, seconds. {none}"),
        "ttft_per_1k_s": seconds_column("+ per 1k", "Additional TTFT per 1,000 uncached prompt tokens, seconds"),
        "tpot_s": seconds_column("TPOT", f"Time per output token, seconds. {none}"),
        "completion_s": seconds_column("Completion", f"Arrival to the last token, seconds. {none}"),
        "max_queue_s": seconds_column(
            "Max queue", "Queue time after which a request goes before higher classes, seconds"
        ),
        "preemptible": column.CheckboxColumn("Preemptible", width=96, help="Preemptible by higher classes"),
        "on_overload": column.SelectboxColumn("Overload", options=list(OVERLOAD), required=True, width=96),
        "downgrade_to": column.SelectboxColumn("Fallback", options=[terms["name"] for terms in classes], width=96),
    }


def draw_ended(page: Page, client: AdminClient, ended: list[dict[str, Any]], known: Answer) -> None:
    """Draw the selected one of the last simulations."""
    labels = {one["id"]: label_of(one) for one in ended}
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    chosen = left.selectbox("Result", list(labels), format_func=lambda one: labels[one], key=f"result {ended[0]['id']}")
    with right:
        icon = ":material/speed:"
        st.page_link(page.others[CLASSES], label="Apply on Service classes", icon=icon, width="stretch")
    one = next(one for one in ended if one["id"] == chosen)
    if one["state"] == "cancelled":
        st.info("This simulation was cancelled.", icon=":material/stop_circle:")
    elif one["state"] == "failed":
        st.error(f"The simulation failed: {as_text(one['problem'])}.", icon=":material/error:")
    else:
        draw_result(client, one, known)


def label_of(one: Mapping[str, Any]) -> str:
    at = datetime.fromisoformat(one["created_at"]).astimezone(session.zone())
    return f"{at:%H:%M:%S} · {simulations.in_words(one['settings'])}"


def draw_result(client: AdminClient, one: Mapping[str, Any], known: Answer) -> None:
    result = one["result"]
    panels.tiles(tiles(result), [known])
    classes = client.get("/classes").data["data"]
    inks = colours.of_classes(terms["name"] for terms in classes)
    frame = simulations.sides_frame(result)
    left_out = f", {short(result['num_unserved'])} without lengths excluded" if result["num_unserved"] else ""
    st.caption(f"Results of one replica. Step time model: {as_text(result['device'])}.")
    note = "by class, one replica"
    figures = {
        "SLO attainment": charts.Figure("attainment", "share of requests", ".1%"),
        "Demand share": charts.Figure("demand_share", "share of device time", ".1%"),
        "TTFT, p99": charts.Figure("ttft_p99_ms", "milliseconds"),
        "Longest queue time": charts.Figure("longest_wait_ms", "milliseconds"),
        "Preemptions": charts.Figure("num_preemptions", "preemptions"),
        "Rejected": charts.Figure("num_rejected", "requests"),
    }
    for number, (title, figure) in enumerate(figures.items()):
        if number % 2 == 0:
            columns = st.columns(2)
        measured = frame[frame[figure.column].notna()]
        if not measured[figure.column].any():
            measured = measured.head(0)  # says more than bars of zero height
        with (
            columns[number % 2],
            panels.panel(title, note, [known], key=f"simulated {figure.column}", frame=measured),
        ):
            panels.draw(
                partial(charts.sides, measured, figure, inks, list(simulations.SIDES.values())),
                measured,
                "None, current or simulated.",
                f"chart {figure.column}",
            )
    totals = simulations.totals_frame(result)
    said = f"{short(result['num_requests'])} requests{left_out}"
    with panels.panel("All requests", said, [known], key="simulated totals", frame=totals):
        panels.table(totals, {"figure": "Metric", **simulations.SIDES}, "", max_rows=20)


def tiles(result: Mapping[str, Any]) -> list[Tile]:
    """Return the most important figures, simulated beside current."""
    now, then = result["now"], result["then"]

    def tile(label: str, shown: Any, name: str, description: str) -> Tile:
        return Tile(label, shown(then[name]), f"current {shown(now[name])}", description)

    capacity = "Share of the capacity of one saturated replica with first-come, first-served scheduling."
    return [
        tile(
            "SLO attainment",
            percent,
            "attainment",
            "Share of requests that attained their SLO; rejected ones count as missed.",
        ),
        tile("Goodput / capacity", percent, "goodput_fraction_of_capacity", capacity),
        tile("Offered load / capacity", percent, "offered_fraction_of_capacity", capacity),
        tile(
            "Wasted prefill",
            percent,
            "wasted_prefill_fraction",
            "Share of computed prompt tokens whose requests never completed.",
        ),
        tile("Preemptions", short, "preemptions", "Of one replica, in the whole time range."),
        tile("Longest queue time", simulations.seconds, "longest_wait_s", "From arrival to the first step."),
    ]

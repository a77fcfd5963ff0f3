"""Contract check: whether a new tenant can be served beside the recent traffic, or what has to be added for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any

import streamlit as st

from moiety_dashboard import charts, colours, panels, session
from moiety_dashboard.client import AdminClient, Answer
from moiety_dashboard.escaping import as_text, show_unseen
from moiety_dashboard.formatting import percent, short
from moiety_dashboard.frames import contracts, simulations
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile

RESULT = "contract check result"
PATH = "/contract-checks"
HOURS = {168: "last 7 days", 24: "last 24 h", 6: "last 6 h", 744: "last 31 days"}
WINDOWS_S = {1800: "busiest 30 min", 600: "busiest 10 min", 3600: "busiest 1 h", 7200: "busiest 2 h"}
NO_TENANT = "No tenant"
ALL_MODELS = "All models"
EACH = "Of each request. If empty, the lengths are drawn from those of recent requests."
VERDICTS = {
    "accepted": ("Accepted", ":material/check_circle:"),
    "needs_more": ("Something has to be added", ":material/add_circle:"),
    "refused": ("Refused", ":material/cancel:"),
}
STATES = {
    "attained": colours.GOOD,
    "missed": colours.BAD,
    contracts.CARRIES: colours.GOOD,
    contracts.CARRIES_NOT: colours.BAD,
}
NEW_TENANT_INK = "#d05a9a"


def draw(page: Page) -> None:
    panels.head("Contract check", "Can I sell this? A new tenant simulated at its limits beside the recent traffic")
    with page.asking() as client:
        body = ask(client)
        if body is not None:
            st.session_state.pop(RESULT, None)
            answer = check(client, body)
            st.session_state[RESULT] = answer, body
        if RESULT in st.session_state:
            draw_result(client, *st.session_state[RESULT])
        else:
            st.caption(
                "The check runs the real scheduler on the deployment's recent arrivals, without the tenant and with "
                "it. If it cannot be served as it is, the check looks for the replicas or the lower classes that it "
                "needs. Serving is not affected."
            )


def ask(client: AdminClient) -> dict[str, Any] | None:
    """Draw the form; return the request of a check that was asked for."""
    classes, engines, tenants, known = client.get_all(
        [("/classes", {}), ("/engines", {}), ("/tenants", {"limit": 500}), ("/simulations", {})]
    )
    with st.container(border=True):
        body = ask_tenant(
            [terms["name"] for terms in classes.data["data"]], {one["id"]: one["name"] for one in tenants.data["data"]}
        )
        with st.form("contract check", border=False):
            body |= ask_limits(is_copied=body["copy_tenant_id"] is not None)
            body |= ask_traffic(engines.data["data"], known.data)
            if st.form_submit_button("Check", type="primary", icon=":material/handshake:"):
                return {name: value for name, value in body.items() if value is not None}
    return None


def ask_tenant(classes: list[str], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the class, and the tenant to copy; outside the form, whose fields depend on it."""
    first, second, third = st.columns(3)
    at = classes.index("standard") if "standard" in classes else 0
    name = first.selectbox("Class", classes, at, format_func=show_unseen)
    copied = second.selectbox(
        "Copy a tenant", [None, *names], format_func=lambda one: NO_TENANT if one is None else show_unseen(names[one]),
        help="Its weight, limits per minute and lengths of requests are used where a field is empty.",
    )  # fmt: skip
    required = third.number_input("Required SLO attainment, %", 0.0, 100.0, 99.0, 0.5)
    return {"service_class": name, "copy_tenant_id": copied, "required": required / 100}


def ask_limits(*, is_copied: bool) -> dict[str, Any]:
    """Return the limits of the contract; those that are left empty are the copied tenant's, or the traffic's."""

    def unless_copied(text: str) -> str:
        return "as copied" if is_copied else text

    first, second, third = st.columns(3)
    requests = first.number_input(
        "Requests per minute", 0.001, 1e6, None if is_copied else 60.0, placeholder=unless_copied("required"),
        help="The tenant sends at this limit all the time.",
    )  # fmt: skip
    tokens = second.number_input("Tokens per minute", 1, 10**12, None, placeholder=unless_copied("no limit"))
    weight = third.number_input("Weight", 0.001, 1000.0, None, placeholder=unless_copied("1"))
    first, second, third = st.columns(3)
    prompt = first.number_input("Input tokens", 1, 10_000_000, None, placeholder=unless_copied("as recent"), help=EACH)
    output = second.number_input(
        "Output tokens", 1, 10_000_000, None, placeholder=unless_copied("as recent"), help=EACH
    )
    replicas = third.number_input("Replicas", 1, 1000, None, placeholder="as now", help="The healthy engines if empty.")
    return {
        "requests_per_minute": requests, "tokens_per_minute": tokens, "weight": weight,
        "input_tokens": prompt, "output_tokens": output, "replicas": replicas,
    }  # fmt: skip


def ask_traffic(engines: list[dict[str, Any]], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recent traffic, the replicas to try, and the step-time model."""
    first, second, third = st.columns(3)
    hours = first.selectbox("Arrivals", list(HOURS), format_func=lambda one: HOURS[one])
    window_s = second.selectbox(
        "Simulated part", list(WINDOWS_S), format_func=lambda one: WINDOWS_S[one], help="A longer part takes longer."
    )
    most = third.number_input("Max replicas to try", 1, 1000, 16)
    first, second, _ = st.columns(3)
    models = contracts.models_of(engines)
    model = first.selectbox(
        "Model", [None, *models], format_func=lambda one: ALL_MODELS if one is None else show_unseen(one)
    )
    devices: dict[tuple[str, str], str] = {
        ("engine_id", one): label for one, label in simulations.learned(engines).items()
    }
    devices |= {("device", name): name for name in known["devices"]}
    description = "Learned by an engine while it served, or computed for a known model on a known device."
    field, name = second.selectbox(
        "Step time model", list(devices), format_func=lambda one: show_unseen(devices[one]), help=description
    )
    return {"hours": hours, "window_s": window_s, "model": model, field: name, "max_replicas": most}


def check(client: AdminClient, body: Mapping[str, Any]) -> Answer:
    """Run the check, and say how long it runs; the gateway ends it when the user leaves the page or cancels."""
    shown = st.empty()
    row = shown.container(border=True, horizontal=True, vertical_alignment="center")
    place, begin_s = row.empty(), time.monotonic()
    row.button("Cancel", icon=":material/stop_circle:")  # any interaction ends this drawing, and with it the request

    def show_time() -> None:
        seconds = time.monotonic() - begin_s
        place.markdown(f":material/hourglass_top: **Simulating** for {seconds:.0f} s; leaving this page ends the check")

    show_time()
    try:
        return client.ask_slowly(PATH, body, show_time)
    finally:
        shown.empty()


def draw_result(client: AdminClient, answer: Answer, body: Mapping[str, Any]) -> None:
    result = answer.data
    if result["state"] != "done":
        st.error(f"The check failed: {as_text(result['problem'])}.", icon=":material/error:")
        if not result["runs"]:
            return
    else:
        title, icon = VERDICTS[result["verdict"]]
        words = f"**{title}**: {as_text(contracts.verdict_in_words(result, body['max_replicas']))}"
        if result["verdict"] == "accepted":
            st.success(words, icon=icon)
        elif result["verdict"] == "refused":
            st.error(words, icon=icon)
        else:
            st.warning(words, icon=icon)
    if warning := contracts.burst_warning(result):
        st.warning(as_text(warning), icon=":material/trending_up:")
    panels.tiles(tiles(result), [answer])
    frame, runs = contracts.attainment_frame(result), contracts.runs_frame(result)
    inks = colours.of_classes(terms["name"] for terms in client.get("/classes").data["data"])
    note = f"{result['terms']['service_class']}, {contracts.replicas_in_words(result['replicas'])}"
    left, right = st.columns(2)
    with left, panels.panel("SLO attainment", note, [answer], key="contract chart", frame=frame):
        sides = contracts.sides_frame(result)
        figure = charts.Figure("attainment", "share of requests", ".1%")
        with_tenant = {**inks, contracts.NEW_TENANT: NEW_TENANT_INK}
        panels.draw(partial(charts.sides, sides, figure, with_tenant, contracts.SIDES), sides, "", "contract sides")
    with right, panels.panel("By class", note, [answer], key="contract classes", frame=frame):
        panels.table(frame, class_columns(), "", classes=inks, states=STATES)
    with panels.panel("All runs", "in their order", [answer], key="contract runs", frame=runs):
        panels.table(runs, run_columns(runs), "", states=STATES)
    st.caption(f"Step time model: {as_text(result['device'])}. The prefix cache is not simulated.")


def tiles(result: Mapping[str, Any]) -> list[Tile]:
    run, terms = result["runs"][0], result["terms"]
    since = result["window_since"]
    at = "no recent traffic" if since is None else f"from {_moment(since)}"
    needed = result["replicas_needed"]
    limit = f"{terms['requests_per_minute']:g} a minute at most"
    return [
        Tile("New tenant's attainment", percent(run["tenant_attainment"]), f"required {percent(result['required'])}",
             "Share of the new tenant's requests that attain their SLO, on the present replicas."),
        Tile("Replicas needed", "–" if needed is None else str(needed), f"{result['replicas']} now",
             "Smallest number that carries the tenant in its class."),
        Tile("Recent requests", short(result["num_requests"]), at, "Requests in the busiest part, without the tenant."),
        Tile("Its requests", short(result["num_contract_requests"]), limit,
             "Poisson arrivals at the limits of the contract."),
    ]  # fmt: skip


def class_columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "class": "Class",
        "before": column.NumberColumn("Without the tenant", format="percent"),
        "with": column.NumberColumn("With the tenant", format="percent"),
        "state": column.TextColumn("SLO", help="Missed: less than required, and less than without the tenant"),
    }


def run_columns(runs: Any) -> dict[str, Any]:
    column = st.column_config
    names = [name for name in runs.columns if name.startswith("of ")]
    return {
        "run": "Class and replicas",
        "state": "Result",
        "tenant": column.NumberColumn("New tenant", format="percent"),
        **{
            name: column.NumberColumn(as_text(show_unseen(name.removeprefix("of "))), format="percent")
            for name in names
        },
        "missed": "Missed",
    }


def _moment(text: str) -> str:
    return f"{datetime.fromisoformat(text).astimezone(session.zone()):%d %b %H:%M}"

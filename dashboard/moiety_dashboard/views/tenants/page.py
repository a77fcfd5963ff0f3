"""Tenants: usage of each against its fair share, and all settings of one tenant."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import colours, panels, session
from moiety_dashboard.client import AdminClient, Answer
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import percent, ratio, short
from moiety_dashboard.frames.tenants import tenants_frame
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.quoted import draw_quotes
from moiety_dashboard.views.rates import RateTexts, draw_rates
from moiety_dashboard.views.tenants import attribution, keys, limits, settings
from moiety_dashboard.views.tenants.names import forget_names
from moiety_dashboard.views.windows import DAY, LIVE, LONG, Window
from moiety_dashboard.views.windows import series as read_series

LAST = "last tenant"
USED = "used by tenant"
FRESH_S = 60.0
CHOSEN = "tenant"  # also in the page's address, so that a tenant can be linked to


def draw(page: Page) -> None:
    page.live(draw_live, slower=2)
    with page.asking() as client:
        tenants = client.list("/tenants").data
        names = {tenant["id"]: tenant["name"] for tenant in tenants}
        if session.is_of_one_tenant():
            chosen = next(iter(names), None)
        else:
            left, right = st.columns([3, 1], vertical_alignment="bottom")
            chosen = choose(left, names)
            if session.may("tenants.write") and right.button("New tenant", icon=":material/add:", width="stretch"):
                create(client)
        tenant = next((tenant for tenant in tenants if tenant["id"] == chosen), None)
        if tenant is not None:
            draw_one(page, client, tenant)


def choose(place: Any, names: Mapping[str, str]) -> str | None:
    """Return the selected tenant: the one in the address, else the last one, else none."""
    ids = list(names)
    requested = st.query_params.get(CHOSEN) or st.session_state.get(LAST)
    at = ids.index(requested) if requested in ids else None
    chosen: str | None = place.selectbox(
        "Tenant", ids, at, format_func=names.get, placeholder="Choose a tenant …", key=f"chosen {requested}"
    )
    if chosen is not None:
        st.session_state[LAST] = chosen
        if st.query_params.get(CHOSEN) != chosen:
            st.query_params[CHOSEN] = chosen
    return chosen


def draw_live(client: AdminClient) -> None:
    is_one = session.is_of_one_tenant()
    of_one, of_all = "Usage, quotas, keys and settings of your tenant", "Usage by tenant, and its fair share by weight"
    panels.head("Tenants", of_one if is_one else of_all)
    labels = [window.label for window in LONG]
    shown = st.segmented_control(
        "Window", labels, default=labels[1], key="long", label_visibility="collapsed", format_func=as_text
    )
    window = next((window for window in LONG if window.label == shown), LONG[1])
    tenants = client.list("/tenants")
    usage = read_usage(client, window)
    classes = client.get("/classes").data["data"]
    frame = tenants_frame(tenants.data, usage.data["data"])
    note = f"last {window.label} in whole hours, including the current one"
    with panels.panel("Your tenant" if is_one else "All tenants", note, [usage, tenants], key="tenants", frame=frame):
        inks = colours.of_classes(terms["name"] for terms in classes)
        none = f"No tenant yet.{session.advice('Create one with the button below.', 'tenants.write')}"
        panels.table(with_cost(frame), columns(), none, classes=inks, max_rows=9)


def read_usage(client: AdminClient, window: Window) -> Answer:
    """Return usage by tenant; for more than a day it is refreshed once a minute.

    A long window covers many hours of many tenants, of which little changes.
    """
    known: tuple[str, float, Answer] | None = st.session_state.get(USED)
    is_long = window.length > DAY
    if is_long and known is not None and known[0] == window.label and time.monotonic() - known[1] < FRESH_S:
        return known[2]
    span = window.span()
    answer = client.get("/usage", group_by="tenant", since=span.since.isoformat(), until=span.until.isoformat())
    st.session_state[USED] = window.label, time.monotonic(), answer
    return answer


def with_cost(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(cost=frame["cost_nanodollars"] / 1e9)


def columns() -> dict[str, Any]:
    column = st.column_config
    fair_share = "The tenant's weight, divided by the weights of all tenants with usage in this time range"
    shares: dict[str, Any] = {"min_value": 0.0, "max_value": 1.0, "format": "percent", "width": 115}
    shown = {
        "tenant": "Tenant",
        "status": "Status",
        "class": "Class",
        "weight": column.NumberColumn("Weight", format="%.3g"),
        "share": column.ProgressColumn("Token share", **shares),
        "entitled": column.ProgressColumn("Fair share", help=fair_share, **shares),
        "requests": panels.count_column("Requests"),
        "rejected": panels.count_column("Rejected"),
        "failed": panels.count_column("Failed"),
        "output_tokens": panels.count_column("Output tokens"),
        "attainment": column.NumberColumn("SLO attainment", format="percent"),
        "ttft_ms": column.NumberColumn("TTFT, ms", format="%,.0f", help="Mean time to first token"),
        "cost": column.NumberColumn("Cost", format="dollar"),
    }
    if session.is_of_one_tenant():  # the user does not see the other tenants, so a share has no meaning
        del shown["share"], shown["entitled"]
    return shown


def draw_one(page: Page, client: AdminClient, tenant: dict[str, Any]) -> None:
    st.subheader(as_text(tenant["name"]), anchor=False)
    panels.chips(colours.of_classes([tenant["service_class"]]))
    names = ["Usage", "End users and tags", "Quotas", "Keys", "Settings"]
    shown = st.segmented_control("Part", names, default="Usage", key="part", label_visibility="collapsed")
    if shown == "End users and tags":
        attribution.draw(client, tenant)
    elif shown == "Quotas":
        limits.draw(client, tenant)
    elif shown == "Keys":
        keys.draw(page, client, tenant)
    elif shown == "Settings":
        settings.draw(client, tenant)
    else:
        page.live(lambda live: draw_usage(live, tenant), slower=2)


def draw_usage(client: AdminClient, tenant: Mapping[str, Any]) -> None:
    """Draw the last hour of one tenant, by class."""
    window = LIVE[1]
    span = window.span()
    answer, frame = read_series(client, window, span, ["service_class"], tenant_id=tenant["id"])
    panels.tiles(tiles(answer, window.length.total_seconds()), [answer])
    inks = colours.of_classes(sorted(set(frame["class"])))
    left, right = st.columns(2)
    none = "This tenant sent no request in the last hour."
    texts = RateTexts("by class, last 1 h, 1 min resolution", none, key="own ")
    draw_rates((left, right), answer, frame, span, inks, texts)
    draw_quotes(client, tenant["id"])


def tiles(answer: Answer, seconds: float) -> list[Tile]:
    totals: dict[str, float] = {}
    for one in answer.data["data"]:
        for name, value in one["totals"].items():
            totals[name] = totals.get(name, 0) + (value or 0)
    get = totals.get
    cached = ratio(get("cached_tokens", 0), get("prompt_tokens", 0))
    rejected = ratio(get("rejected", 0), get("requests", 0))
    return [
        Tile("Requests, 1 h", short(get("requests", 0)), f"{percent(rejected)} rejected"),
        Tile("Prompt tokens, 1 h", short(get("prompt_tokens", 0)), f"{percent(cached)} from the prefix cache"),
        Tile("Output tokens, 1 h", short(get("output_tokens", 0)), f"{short(get('output_tokens', 0) / seconds)} tok/s"),
        Tile(
            "SLO attainment, 1 h",
            percent(ratio(get("num_slo_attained", 0), get("num_slo_requests", 0))),
            "of requests with an SLO",
        ),
        Tile("Preemptions, 1 h", short(get("preemptions", 0)), "by higher classes or for memory"),
    ]


@st.dialog("New tenant")
def create(client: AdminClient) -> None:
    classes = [terms["name"] for terms in client.get("/classes").data["data"]]
    with st.form("new tenant", border=False):
        name = st.text_input("Name", placeholder="acme")
        highest = st.selectbox("Highest class", classes, classes.index("standard") if "standard" in classes else 0)
        weight = st.number_input("Weight", 0.001, 1000.0, 1.0, help="Fair-share weight among the tenants of the class")
        if st.form_submit_button("Create tenant", type="primary"):
            body = {"name": name, "service_class": highest, "weight": weight}
            made = panels.attempt(lambda: client.change("POST", "/tenants", body), f"Tenant {name} created.")
            if made is not None:
                forget_names()
                st.query_params[CHOSEN] = made["id"]
                st.rerun()

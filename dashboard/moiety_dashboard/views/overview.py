"""The overview: the system's health, now and over time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import charts, colours, panels, samples, session
from moiety_dashboard.client import AdminClient, Answer
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import percent, ratio, short
from moiety_dashboard.frames import fleet, series
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.columns import class_columns
from moiety_dashboard.views.rates import RateTexts, draw_rates
from moiety_dashboard.views.windows import HOUR, LIVE, MINUTE, Window
from moiety_dashboard.views.windows import series as read_series

NOW = 5 * MINUTE
EMPTY = "No request ended in this time range. Send one on the Playground page."
HOW = "`moiety serve` prints a `curl` command that sends one, too."


def draw(page: Page) -> None:
    labels = [window.label for window in LIVE]
    page.live(lambda client: draw_live(client, labels))


def draw_live(client: AdminClient, labels: list[str]) -> None:
    engines = client.get("/engines") if session.may("engines.read") else None
    what = (
        "Requests, tokens and SLO attainment of your tenant" if engines is None else "Health of all engines and classes"
    )
    panels.head("Overview", f"{what}, now and over time")
    classes = client.get("/classes")
    if engines is not None:
        draw_state(engines)
    draw_now(client, engines)
    shown = st.segmented_control(
        "Window", labels, default=labels[1], key="window", label_visibility="collapsed", format_func=as_text
    )
    window = next((window for window in LIVE if window.label == shown), LIVE[1])
    inks = colours.of_classes(terms["name"] for terms in classes.data["data"])
    draw_charts(client, window, inks)
    draw_classes(client, classes, engines, inks)


def draw_state(engines: Answer) -> None:
    listed = engines.data["data"]
    ready = [engine for engine in listed if fleet.engine_state(engine) == "ready"]
    models = as_text(", ".join(sorted({engine["card"]["model"] for engine in ready if engine["card"]})))
    if not ready:
        st.badge("no engine is ready: all requests fail with 503", icon=":material/error:", color="red")
    elif len(ready) < len(listed):
        said = f"{len(ready)} of {len(listed)} engines ready, serving {models}"
        st.badge(said, icon=":material/warning:", color="orange")
    else:
        st.badge(
            f"serving {models} on {len(ready)} engine{'s'[: len(ready) > 1]}",
            icon=":material/check_circle:",
            color="green",
        )


def draw_now(client: AdminClient, engines: Answer | None) -> None:
    """Draw the last minutes in numbers, beside the last hour."""
    now = datetime.now(UTC)
    recent = client.get("/usage/minutes", step=60, since=(now - NOW).isoformat())
    hour = client.get("/usage/minutes", since=(now - HOUR).isoformat())
    last, whole = series.totals_of(recent.data["data"]), series.totals_of(hour.data["data"])
    history = partial(
        series.history, series.minutes_frame(hour.data["data"], MINUTE, now), span=HOUR, step=MINUTE, now=now
    )
    last_s, whole_s = NOW.total_seconds(), HOUR.total_seconds()
    attained, attained_hour = (ratio(sums["num_slo_attained"], sums["num_slo_requests"]) for sums in (last, whole))
    failed, rejected = (ratio(last[how], last["requests"]) for how in ("failed", "rejected"))
    found = [
        Tile(
            "Goodput, 5 min", f"{short(last['good_tokens'] / last_s)} tok/s",
            f"{short(whole['good_tokens'] / whole_s)} tok/s over 1 h",
            "Output tokens per second of requests that attained their SLO.", history("good_per_s"),
        ),
        Tile(
            "SLO attainment, 5 min", percent(attained), f"{percent(attained_hour)} over 1 h",
            "Share of requests that attained their SLO. Requests rejected for overload count as missed.",
            series.shares(hour.data["data"], ("num_slo_attained",), "num_slo_requests"),
        ),
        Tile(
            "Requests, 5 min", f"{short(last['requests'] / last_s)} /s", f"{short(whole['requests'])} in 1 h",
            "Ended requests, whatever their outcome.", history("requests"),
        ),
        Tile(
            "Output, 5 min", f"{short(last['output_tokens'] / last_s)} tok/s",
            f"{short(whole['output_tokens'])} tokens in 1 h",
            "All output tokens, whether or not the SLO was attained.", history("tokens_per_s"),
        ),
        *fleet_tiles(engines),
        Tile(
            "Error rate, 5 min", percent(failed), f"{percent(rejected)} rejected",
            "Share of requests that failed. Rejected requests exceeded a quota, met an overload or were invalid.",
            series.shares(hour.data["data"], ("failed",), "requests"),
        ),
    ]  # fmt: skip
    panels.tiles(found, [recent, hour, *([engines] if engines else [])])


def fleet_tiles(engines: Answer | None) -> list[Tile]:
    """Return tiles of the queue and the memory, from the engines' last heartbeats."""
    if engines is None:
        return []
    now = fleet.fleet(engines.data["data"])
    used = ratio(now["kv_blocks_used"], now["kv_blocks_total"])
    cached = ratio(now["kv_blocks_cached"], now["kv_blocks_total"])
    seen = samples.watch(engines.data["data"])
    since = "The line begins when you signed in."
    return [
        Tile(
            "Queue, now", f"{now['num_waiting']:,.0f}", f"{now['num_running']:,.0f} running",
            f"Waiting requests. {since}", fleet.over_time(seen, "num_waiting"),
        ),
        Tile(
            "KV cache, now", percent(used), f"{percent(cached)} reusable",
            f"Share of blocks in use, and of free blocks with a reusable prefix. {since}",
            fleet.over_time(seen, "kv_blocks_used", "kv_blocks_total"),
        ),
    ]  # fmt: skip


def draw_charts(client: AdminClient, window: Window, inks: Mapping[str, str]) -> None:
    span = window.span()
    answer, frame = read_series(client, window, span, ["service_class"])
    over = f"by class, last {window.label}, {window.slot} resolution"
    none = f"{EMPTY}{session.advice(HOW, session.DEPLOYS)}"
    left, right = st.columns(2)
    draw_rates((left, right), answer, frame, span, inks, RateTexts(over, none))
    ended = series.outcomes(frame)
    with (
        left,
        panels.panel("Requests per minute", over.replace("class", "outcome"), [answer], key="ends", frame=ended),
    ):
        figure = charts.Figure("per_minute", "requests/min")
        panels.draw(lambda: charts.stacked(ended, figure, "outcome", colours.OUTCOMES, span), ended, none, "ends chart")
    with right, panels.panel("Mean time to first token (TTFT)", over, [answer], key="ttft", frame=frame):
        begun = frame[frame["ttft_ms"].notna()]
        figure = charts.Figure("ttft_ms", "ms, log scale", is_log=True)
        panels.draw(lambda: charts.lines(begun, figure, "class", inks, span), begun, none, "ttft chart")


def draw_classes(client: AdminClient, classes: Answer, engines: Answer | None, inks: Mapping[str, str]) -> None:
    since = (datetime.now(UTC) - HOUR).isoformat()
    sums = client.get("/usage/minutes", group_by="service_class", step=60, since=since)
    frame = classes_of_hour(classes, sums, engines)
    answers = [sums, classes, *([engines] if engines else [])]
    note = "last 1 h" + ("; queues now" if engines else "")
    with panels.panel("Service classes", note, answers, key="classes", frame=frame):
        panels.table(frame, class_columns(with_load=engines is not None), "No service class is defined.", classes=inks)


def classes_of_hour(classes: Answer, sums: Answer, engines: Answer | None) -> pd.DataFrame:
    """Return the class frame from sums by class that may lie in two slots of an hour."""
    merged: dict[str, dict[str, Any]] = {}
    for one in sums.data["data"]:
        known = merged.setdefault(one["group"]["service_class"], {"group": one["group"], "totals": {}})
        known["totals"] = add_totals(known["totals"], one["totals"])
    listed = engines.data["data"] if engines else []
    return fleet.classes_frame(classes.data["data"], list(merged.values()), listed, datetime.now(UTC))


def add_totals(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the added sums, with means weighted by their requests."""
    if not before:
        return dict(more)
    weights = before["requests"], more["requests"]
    added: dict[str, Any] = {}
    for name, value in more.items():
        pair = [(one, weight) for one, weight in zip((before[name], value), weights, strict=True) if one is not None]
        if not name.startswith("mean_"):
            added[name] = before[name] + value
        else:
            whole = sum(weight for _, weight in pair)
            added[name] = sum(one * weight for one, weight in pair) / whole if whole else None
    return added

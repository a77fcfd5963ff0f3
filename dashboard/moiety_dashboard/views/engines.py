"""Engines: the current state of each, and a way to take it out of service."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import charts, colours, panels, samples, session
from moiety_dashboard.client import AdminClient, Answer, path_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import NO_VALUE, percent, ratio, short, short_address, time_left
from moiety_dashboard.frames import fleet
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.windows import HOUR

DRAWN = "engine states as drawn"
WATCHED = timedelta(minutes=15)


def draw(page: Page) -> None:
    st.session_state.pop(DRAWN, None)
    page.live(draw_live)
    with page.asking() as client:
        draw_drain(client)


def draw_live(client: AdminClient) -> None:
    panels.head("Engines", "Engine replicas of this gateway, at their last heartbeat")
    answer = client.get("/engines")
    engines = answer.data["data"]
    if not engines:
        st.info(
            "This gateway has no engine. Start one with `moiety engine --listen tcp://127.0.0.1:5757`, and the "
            "gateway with `--engine tcp://127.0.0.1:5757`.",
            icon=":material/memory:",
        )
        return
    seen = samples.watch(engines)
    panels.tiles(fleet_tiles(engines, seen), [answer])
    frame = fleet.engines_frame(engines)
    frame["output_per_s"] = [samples.latest_rate(seen, address, "output_tokens_total") for address in frame["address"]]
    for name in ("prefill", "decode"):
        frame[name] = [samples.latest_rate(seen, address, f"{name}_seconds_total") for address in frame["address"]]
    frame["prompt_per_s"] = [samples.latest_rate(seen, address, "prompt_tokens_total") for address in frame["address"]]
    with panels.panel("Replicas", "now; rates since the last refresh", [answer], key="engines", frame=frame):
        panels.table(frame, columns(), "")
    draw_watched(seen, answer)
    draw_memory(client, answer)
    draw_classes(client, answer)
    if st.session_state.get(DRAWN, states_of(engines)) != states_of(engines):
        st.rerun()  # the buttons below are outside this part


def states_of(engines: list[dict[str, Any]]) -> dict[str, str]:
    return {engine["address"]: fleet.engine_state(engine) for engine in engines}


def fleet_tiles(engines: list[dict[str, Any]], seen: samples.Samples) -> list[Tile]:
    now = fleet.fleet(engines)
    ready = sum(fleet.engine_state(engine) == "ready" for engine in engines)
    speeds = [samples.latest_rate(seen, engine["address"], "output_tokens_total") for engine in engines]
    known = [speed for speed in speeds if speed is not None]
    loads = [engine["load"] for engine in engines if engine["load"]]
    hits = ratio(sum(load["cached_tokens_total"] for load in loads), sum(load["prompt_tokens_total"] for load in loads))
    used = ratio(now["kv_blocks_used"], now["kv_blocks_total"])
    return [
        Tile("Ready", f"{ready} of {len(engines)}", "engines"),
        Tile("Running", f"{now['num_running']:,.0f}", f"{now['num_paused']:,.0f} paused for a slow client"),
        Tile("Waiting", f"{now['num_waiting']:,.0f}", "requests in the engines' queues"),
        Tile("Output", f"{short(sum(known)) if known else NO_VALUE} tok/s", "since the last refresh"),
        Tile("KV cache usage", percent(used), f"of {short(now['kv_blocks_total'])} blocks"),
        Tile("Prefix cache hit rate", percent(hits), "of prompt tokens, since start"),
    ]


def columns() -> dict[str, Any]:
    column = st.column_config
    share: dict[str, Any] = {"min_value": 0.0, "max_value": 1.0, "format": "percent"}
    return {
        "engine": column.TextColumn("Address", width=205),
        "state": "State",
        "model": "Model",
        "device": "Device",
        "running": column.NumberColumn("Running", help="Sequences in the batch"),
        "waiting": column.NumberColumn("Waiting", help="Sequences in the queue"),
        "kv_used": column.ProgressColumn("KV usage", width=110, **share),
        "kv_cached": column.NumberColumn("KV reusable", format="percent", help="Free blocks with a reusable prefix"),
        "hit_rate": column.NumberColumn(
            "Prefix hit rate", format="percent", help="Share of prompt tokens, since the engine's start"
        ),
        "prefill": column.NumberColumn("Prefill", format="percent", help="Share of time in steps with prompt tokens"),
        "decode": column.NumberColumn("Decode", format="percent", help="Share of time in steps without prompt tokens"),
        "prompt_per_s": column.NumberColumn("Prompt tok/s", format="%,.0f", help="Prompt tokens per second"),
        "output_per_s": column.NumberColumn("Output tok/s", format="%,.0f", help="Output tokens per second"),
    }


def draw_watched(seen: samples.Samples, answer: Answer) -> None:
    """Draw memory and batch size since the start of this session; the engines keep no history of them."""
    engines, now = answer.data["data"], datetime.now(UTC)
    since = now - WATCHED
    rows = [
        {
            "slot": datetime.fromtimestamp(at_s, UTC),
            "engine": short_address(address),
            "kv_used": ratio(load["kv_blocks_used"], load["kv_blocks_total"]),
            "running": load["num_running"],
        }
        for address in (engine["address"] for engine in engines)
        for at_s, load in seen[address]
        if at_s >= since.timestamp()
    ]
    frame = pd.DataFrame(rows, columns=["slot", "engine", "kv_used", "running"])
    inks = {name: colours.TENANTS[n % len(colours.TENANTS)] for n, name in enumerate(map(short_address, sorted(seen)))}
    span = charts.Span(since, now, timedelta(0))
    note = "since you signed in, last 15 min at most"
    left, right = st.columns(2)
    with left, panels.panel("KV cache usage", note, [answer], key="kv over time", frame=frame):
        known = frame[frame["kv_used"].notna()]
        figure = charts.Figure("kv_used", "share of blocks", ".1%")
        none = "This engine does not report its KV cache."
        panels.draw(lambda: charts.lines(known, figure, "engine", inks, span), known, none, "kv chart")
    with right, panels.panel("Running sequences", note, [answer], key="batch over time", frame=frame):
        figure = charts.Figure("running", "sequences")
        panels.draw(lambda: charts.lines(frame, figure, "engine", inks, span), frame, "", "batch chart")
    steps = fleet.time_frame({engine["address"]: seen[engine["address"]] for engine in engines}, since)
    inks = {"prefill": colours.PREFILL, "decode": colours.DECODE}
    with panels.panel(
        "Prefill and decode time", f"mean over the engines, {note}", [answer], key="time over time", frame=steps
    ):
        figure = charts.Figure("share", "share of time", ".1%")
        none = "No data yet: the chart needs two heartbeats."
        panels.draw(
            lambda: charts.lines(steps, figure, "kind", inks, span, width_px=charts.WHOLE_PX), steps, none, "time chart"
        )


def draw_memory(client: AdminClient, engines: Answer) -> None:
    """Draw each tenant's share of the KV cache and its prefix cache hits."""
    sums = client.get("/usage/minutes", group_by="tenant", step=60, since=(datetime.now(UTC) - HOUR).isoformat())
    frame = fleet.memory_frame(engines.data["data"], sums.data["data"])
    column = st.column_config
    columns = {
        "tenant": "Tenant",
        "kv_share": column.ProgressColumn("KV usage, now", min_value=0.0, max_value=1.0, format="percent"),
        "kv_blocks": column.NumberColumn(
            "Blocks", format="localized", help="A block that several requests share counts for each of them"
        ),
        "prompt_tokens": panels.count_column("Prompt tokens, 1 h"),
        "cached_tokens": panels.count_column("Cached prompt tokens"),
        "hit_rate": column.NumberColumn("Prefix hit rate, 1 h", format="percent", help="Share of prompt tokens"),
    }
    with panels.panel(
        "KV cache by tenant", "now; prefix hit rate of the last hour", [engines, sums], key="memory", frame=frame
    ):
        panels.table(frame, columns, "No tenant has used an engine in the last hour.")


def draw_classes(client: AdminClient, answer: Answer) -> None:
    """Draw the decisions since the engine's start, by engine and class."""
    classes = client.get("/classes")
    inks = colours.of_classes(terms["name"] for terms in classes.data["data"])
    rows = [
        {"engine": short_address(engine["address"]), "class": name, **loads[name]}
        for engine in answer.data["data"]
        for loads in [fleet.class_loads([engine])]
        for name in inks
        if name in loads
    ]
    frame = pd.DataFrame(rows)
    counts = {"admitted": "Admitted", "rejected": "Rejected", "downgraded": "Downgraded", "preempted": "Preempted",
              "demoted": "Demoted", "boosted": "Boosted"}  # fmt: skip
    shown = {"engine": "Engine", "class": "Class", "num_waiting": "Waiting", "num_running": "Running", **counts}
    with panels.panel(
        "Scheduling decisions by class", "since each engine started", [answer, classes], key="decisions", frame=frame
    ):
        panels.table(frame, shown, "No engine has received a request yet.", classes=inks)


def draw_drain(client: AdminClient) -> None:
    listed = client.get("/engines").data["data"]
    st.session_state[DRAWN] = states_of(listed)
    engines = [engine for engine in listed if engine["card"]]
    if not engines or not session.may("engines.sleep"):
        return
    st.subheader("Take out of service", anchor=False)
    st.caption(
        "A drained engine accepts no new requests from any gateway, finishes the running ones, then enters sleep mode "
        "and frees its device memory. It accepts requests again after it is woken or restarted."
    )
    for engine in engines:
        load = engine["load"] or {}
        state = fleet.engine_state(engine)
        row = st.container(border=True, horizontal=True, vertical_alignment="center")
        up = f", up {time_left(load['running_for_s'])}" if load.get("running_for_s") else ""
        problem = as_text(load.get("sleep_problem", ""))
        row.markdown(f"{as_text(engine['address'])}  {as_text(state.split(':')[0])}{up}  {problem}")
        is_asleep = state in ("falling asleep", "asleep", "waking")
        label, icon = ("Wake", ":material/play_arrow:") if is_asleep else ("Drain", ":material/pause:")
        if row.button(label, icon=icon, key=f"drain {engine['address']}", disabled=not engine["healthy"]):
            confirm(client, engine, is_asleep)


def confirm(client: AdminClient, engine: Mapping[str, Any], is_asleep: bool) -> None:
    path = path_of("engines", engine["card"]["engine_id"])
    if is_asleep:
        what, button, done = (
            "Wake this engine? It loads its weights before it accepts requests.",
            "Wake",
            "The engine is waking.",
        )
        panels.ask_first(what, button, lambda: client.change("POST", f"{path}/wake"), done)
        return
    open_now = f"Its {(engine['load'] or {}).get('num_running', 0):,d} running requests finish first."
    what = f"Drain {as_text(engine['address'])}? {open_now} Requests fail with 503 if no other engine serves its model."
    panels.ask_first(what, "Drain", lambda: client.change("POST", f"{path}/sleep"), "The engine is draining.")

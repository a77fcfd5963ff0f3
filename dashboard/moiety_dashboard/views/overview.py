"""The overview: is it well, who uses it, and how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import charts, frames
from moiety_dashboard.client import AdminClient, RoleRefused

LIVE_SPAN, LIVE_STEP = timedelta(minutes=15), timedelta(seconds=15)
DAY_SPAN, DAY_STEP = timedelta(hours=24), timedelta(hours=1)
WINDOWS = ("Last 15 minutes", "Last 24 hours")
ENDINGS = {"stop": "served", "length": "served"}  # the rest are named as they are


@dataclass(frozen=True, slots=True)
class OverviewData:
    """All that the page shows, asked for at one moment; `engines` is None for administrators of one tenant, who do not
    see them."""

    now: datetime
    overview: Mapping[str, Any]
    engines: list[dict[str, Any]] | None
    tenants: list[dict[str, Any]]
    projects: list[dict[str, Any]]
    keys: list[dict[str, Any]]
    by_tenant: list[dict[str, Any]]


def load(client: AdminClient) -> OverviewData:
    """Ask for everything but the charts' data. Raises ApiError."""
    overview = client.get("/admin/v1/overview")
    return OverviewData(
        now=datetime.now(UTC),
        overview=overview,
        engines=load_engines(client),
        tenants=client.list("/admin/v1/tenants"),
        projects=client.list("/admin/v1/projects"),
        keys=client.list("/admin/v1/keys"),
        by_tenant=client.get("/admin/v1/usage", group_by="tenant")["data"],
    )


def load_engines(client: AdminClient) -> list[dict[str, Any]] | None:
    try:
        engines: list[dict[str, Any]] = client.get("/admin/v1/engines")["data"]
    except RoleRefused:
        return None
    return engines


def draw(client: AdminClient) -> None:
    """The whole page. Raises ApiError before it draws anything of a gateway that is away."""
    data = load(client)
    draw_state(data)
    draw_figures(data.overview)
    draw_charts(client, data)
    if data.engines is not None:
        draw_engines(data.engines)
    draw_tenants(data)
    draw_keys(data)


def draw_state(data: OverviewData) -> None:
    ready = [engine for engine in data.engines or [] if engine["healthy"] and not engine["draining"]]
    models = ", ".join(sorted({engine["card"]["model"] for engine in ready if engine["card"]}))
    left, right = st.columns([3, 1], vertical_alignment="center")
    with left:
        if ready:
            st.badge(f"serving {models}", icon=":material/check_circle:", color="green")
        elif data.engines is not None:
            st.badge("no engine is ready: requests are refused", icon=":material/error:", color="red")
    right.caption(f"as of {data.now.astimezone():%H:%M:%S}", text_alignment="right")


def draw_figures(overview: Mapping[str, Any]) -> None:
    """The day in six numbers."""
    day, hour = overview["last_24_hours"], overview["last_hour"]
    broken = day["failed"] + day["rejected"]
    ttft_ms = hour["mean_ttft_ms"]
    cached = share(day["cached_tokens"], day["prompt_tokens"])
    figures = (
        ("Requests, 24 h", f"{day['requests']:,}", f"{hour['requests']:,} in the last hour"),
        ("Output tokens, 24 h", short(day["output_tokens"]), f"{short(hour['output_tokens'])} in the last hour"),
        ("Prompt tokens, 24 h", short(day["prompt_tokens"]), f"{cached} cached"),
        ("Mean time to first token", "–" if ttft_ms is None else f"{ttft_ms:,.0f} ms", "over the last hour"),
        ("Failed or rejected, 24 h", f"{broken:,}", f"{share(broken, day['requests'])} of the requests"),
        ("Active keys", f"{overview['keys_active']:,}", f"of {overview['tenants_active']:,} active tenants"),
    )
    for column, (label, value, note) in zip(st.columns(len(figures)), figures, strict=True):
        with column.container(border=True, height="stretch", gap=None):
            st.metric(label, value)
            st.caption(note)


def draw_charts(client: AdminClient, data: OverviewData) -> None:
    window = st.segmented_control("Window", WINDOWS, default=WINDOWS[0], key="window", label_visibility="collapsed")
    live = window != WINDOWS[1]
    by_outcome, by_tenant = read_live(client, data) if live else read_day(client)
    span, step = (LIVE_SPAN, LIVE_STEP) if live else (DAY_SPAN, DAY_STEP)
    shown = (data.now - span, data.now)
    left, right = st.columns(2)
    with left.container(border=True):
        st.markdown("**Requests** by how they ended")
        draw_bars(by_outcome, "outcome", "requests", shown, step)
    with right.container(border=True):
        st.markdown("**Output tokens** by tenant")
        draw_bars(by_tenant, "tenant", "tokens", shown, step)


def draw_bars(frame: pd.DataFrame, field: str, title: str, span: tuple[datetime, datetime], step: timedelta) -> None:
    if frame.empty:
        st.caption("Nothing in this time.")
        return
    st.altair_chart(charts.bars_over_time(frame, field, title, span, step), width="stretch")


def read_live(client: AdminClient, data: OverviewData) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The last minutes from single requests: by outcome, and tokens by tenant."""
    rows = client.list("/admin/v1/usage/requests", since=(data.now - LIVE_SPAN).isoformat())
    requests = frames.requests_frame(rows, data.tenants)
    requests["outcome"] = requests["outcome"].replace(ENDINGS)
    if requests.empty:
        return requests, requests
    counts = frames.count_by_time(requests, "outcome", None, LIVE_STEP)
    return counts, frames.count_by_time(requests, "tenant", "output_tokens", LIVE_STEP)


def read_day(client: AdminClient) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The last day from the hours' sums."""
    hours = frames.hourly_frame(client.get("/admin/v1/usage", group_by="hour,tenant")["data"])
    outcomes = list(charts.OUTCOME_COLOURS)
    by_outcome = hours.melt(["slot"], outcomes, var_name="outcome", value_name="amount")
    return by_outcome[by_outcome["amount"] > 0], hours.rename(columns={"output_tokens": "amount"})


def draw_engines(engines: list[dict[str, Any]]) -> None:
    st.subheader("Engines")
    if not engines:
        st.caption("The gateway knows no engine.")
        return
    share_of_memory: dict[str, Any] = {"min_value": 0.0, "max_value": 1.0, "format": "percent"}
    columns: dict[str, Any] = {
        "model": "Model",
        "device": "Runs on",
        "state": "State",
        "running": st.column_config.NumberColumn("Running", help="Sequences in the batch"),
        "waiting": st.column_config.NumberColumn("Waiting", help="Sequences in the queue"),
        "paused": st.column_config.NumberColumn("Paused", help="Running, but without credit"),
        "kv_used": st.column_config.ProgressColumn("KV cache in use", **share_of_memory),
        "kv_cached": st.column_config.ProgressColumn("KV cache kept for reuse", **share_of_memory),
        "output_tokens": st.column_config.NumberColumn("Output tokens", format="localized", help="Since its start"),
        "address": None,
        "prompt_tokens": None,
        "cached_tokens": None,
    }
    st.dataframe(frames.engines_frame(engines), column_config=columns, hide_index=True, width="stretch")


def draw_tenants(data: OverviewData) -> None:
    st.subheader("Tenants")
    columns: dict[str, Any] = {
        "tenant": "Tenant",
        "class": "Class",
        "weight": st.column_config.NumberColumn("Weight", format="%.2g"),
        "status": "Status",
        "requests": st.column_config.NumberColumn("Requests, 24 h", format="localized"),
        "failed": st.column_config.NumberColumn("Failed", format="localized"),
        "prompt_tokens": st.column_config.NumberColumn("Prompt tokens", format="localized"),
        "output_tokens": st.column_config.NumberColumn("Output tokens", format="localized"),
        "ttft_ms": st.column_config.NumberColumn("Mean TTFT, ms", format="%.0f"),
    }
    frame = frames.tenants_frame(data.tenants, data.by_tenant)
    st.dataframe(frame, column_config=columns, hide_index=True, width="stretch")


def draw_keys(data: OverviewData) -> None:
    st.subheader("Keys")
    columns: dict[str, Any] = {
        "key": "Ends in",
        "name": "Name",
        "owner": "Owner",
        "status": "Status",
        "created": "Created",
        "expires": "Expires",
    }
    frame = frames.keys_frame(data.keys, data.projects, data.tenants)
    st.dataframe(frame, column_config=columns, hide_index=True, width="stretch")


def short(number: float) -> str:
    """1234 → 1.2 k."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 10 * size or (unit != "k" and number >= size):
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f}"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0 %"

"""Table columns that several pages show."""

from __future__ import annotations

from typing import Any

import streamlit as st

from moiety_dashboard import panels

LOAD = ("waiting", "oldest_s", "running")  # of the engines, which users of one tenant do not see


def class_columns(*, with_load: bool) -> dict[str, Any]:
    """Return the columns of a table of classes."""
    column = st.column_config
    shown: dict[str, Any] = {
        "class": "Class",
        "slo": column.TextColumn("SLO", width=230),
        "attainment": column.NumberColumn("SLO attainment, 1 h", format="percent"),
        "burn": column.NumberColumn(
            "Burn rate",
            format="%.1f×",
            help="Burn rate of the error budget (1 % of requests may miss the SLO); above 1× the budget is "
            "exhausted early",
        ),
        "requests": panels.count_column("Requests, 1 h"),
        "ttft_ms": column.NumberColumn("TTFT, ms", format="%,.0f", help="Mean time to first token, last hour"),
        "queue_ms": column.NumberColumn("Queue time, ms", format="%,.0f", help="Mean time in the queue, last hour"),
        "preemptions": panels.count_column("Preemptions, 1 h"),
        "waiting": panels.count_column("Waiting", tooltip="Requests in the engines' queues, now"),
        "oldest_s": column.NumberColumn(
            "Oldest waiting, s", format="%.1f", help="Age of the longest-waiting request, now"
        ),
        "running": panels.count_column("Running", tooltip="Requests in the engines' batches, now"),
    }
    return {name: column for name, column in shown.items() if with_load or name not in LOAD}


def token_columns() -> dict[str, Any]:
    return {
        "prompt_tokens": panels.count_column("Prompt tokens"),
        "cached_tokens": panels.count_column("Cached tokens"),
        "output_tokens": panels.count_column("Output tokens"),
    }


def scope_columns(share: str) -> dict[str, Any]:
    """Return columns of whom a limit is for, what it limits, and the share of it that is used, with this heading."""
    column = st.column_config
    return {
        "scope": "Scope",
        "limit": "Limit",
        "share": column.ProgressColumn(share, min_value=0.0, max_value=1.0, format="percent"),
    }


def limit_columns() -> dict[str, Any]:
    column = st.column_config
    return {
        **scope_columns("Usage"),
        "used": "Used",
        "reserved": column.TextColumn("Reserved", help="Leased by gateways for running and upcoming requests"),
        "cap": "Cap",
        "lasts": column.TextColumn("Exhausted in", help="At the usage rate of the last one to two hours"),
        "resets": column.TextColumn("Resets"),
        "alerts": column.TextColumn("Alerts at", help="Percentages of the cap at which webhooks are notified"),
    }

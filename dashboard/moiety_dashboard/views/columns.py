"""Table columns that several pages show."""

from __future__ import annotations

from typing import Any

import streamlit as st


def class_columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "class": "Class",
        "promise": column.TextColumn("Promise", width=230),
        "attainment": column.NumberColumn("Attained, 1 h", format="percent"),
        "burn": column.NumberColumn(
            "Burn",
            format="%.1f×",
            help="How fast the 1 % of promises that may be missed is used up: 1× is just in time.",
        ),
        "requests": column.NumberColumn("Requests, 1 h", format="localized"),
        "ttft_ms": column.NumberColumn("TTFT, ms", format="%.0f", help="Mean time to the first token, last hour"),
        "queue_ms": column.NumberColumn("Queue, ms", format="%.0f", help="Mean time in the queue, last hour"),
        "preemptions": column.NumberColumn("Preempted, 1 h", format="localized"),
        "waiting": column.NumberColumn("Waiting", format="localized", help="Now, in the engines' queues"),
        "oldest_s": column.NumberColumn("Oldest, s", format="%.1f", help="How long ago the oldest came that waits now"),
        "running": column.NumberColumn("Running", format="localized", help="Now, in the engines' batches"),
    }


def limit_columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "scope": column.TextColumn("On", width="medium"),
        "limit": "Of",
        "share": column.ProgressColumn("Of the cap", min_value=0.0, max_value=1.0, format="percent"),
        "used": "Used",
        "reserved": column.TextColumn("Reserved", help="Leased to gateways, for requests that run or are to come"),
        "cap": "Cap",
        "lasts": column.TextColumn("Lasts", help="At the pace of the last hour or so"),
        "resets": column.TextColumn("Whole again"),
    }

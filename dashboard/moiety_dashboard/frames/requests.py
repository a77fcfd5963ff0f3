"""Requests of the request log as frames. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import moment

COLUMNS = (
    *("at", "tenant", "key", "model", "route", "class", "outcome", "status_code", "error", "prompt_tokens"),
    *("cached_tokens", "output_tokens", "cost", "ttft_ms", "duration_ms", "slo", "end_user", "tags", "endpoint"),
    *("trace", "request_id"),
)
SLO = {True: "attained", False: "missed", None: None}


def requests_frame(requests: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per request, in the given order. `names` maps ids of tenants and keys; cost is in dollars."""
    rows = [
        {
            "at": moment(one["started_at"]),
            "tenant": names.get(one["tenant_id"], one["tenant_id"]),
            "key": names.get(one["key_id"], one["key_id"]),
            "class": one["service_class"],
            "status_code": one["http_status"],
            "error": one["error_code"],
            "cost": one["cost_nanodollars"] / 1e9,
            "slo": SLO[one["slo_attained"]],
            "tags": tags_in_line(one["tags"]),
            "trace": one["has_trace"],
            **{name: one[name] for name in COLUMNS if name in one and name != "tags"},
        }
        for one in requests
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def tags_in_line(tags: Mapping[str, str]) -> str | None:
    """Return the tags in one line, None without any."""
    return ", ".join(f"{name}={value}" for name, value in tags.items()) or None

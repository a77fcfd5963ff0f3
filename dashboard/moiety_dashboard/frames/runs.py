"""Agent runs, and the requests of one run as bars over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import moment, ratio
from moiety_dashboard.frames.catalogue import dollars_of
from moiety_dashboard.frames.traces import FAILED, GATEWAY

RUN_COLUMNS = (
    *("name", "tenant", "status", "requests", "tokens", "token_share", "cost", "cost_share"),
    *("deadline", "created", "id"),
)
EXPIRED = "expired"
BAR_COLUMNS = ("row", "label", "start_ms", "end_ms", "duration_ms", "who", "attributes")
GOOD = ("stop", "length", "content_filter", "open")


def runs_frame(runs: Sequence[Mapping[str, Any]], names: Mapping[str, str], now: datetime) -> pd.DataFrame:
    """Return one row per run of `/runs`. Shares are of the budgets, None without one; money is in dollars.

    A run whose deadline has passed takes no requests, whatever its stored status.
    """
    rows = []
    for run in runs:
        deadline = moment(run["deadline_at"])
        is_late = run["status"] == "active" and deadline is not None and deadline <= now
        tokens, used, cost = run["budget_tokens"], dollars_of(run["used_usd"]), dollars_of(run["budget_usd"])
        row = {
            "name": run["name"],
            "tenant": names.get(run["tenant_id"], run["tenant_id"]),
            "status": EXPIRED if is_late else run["status"],
            "requests": run["num_requests"],
            "tokens": run["used_tokens"],
            "token_share": None if tokens is None else ratio(run["used_tokens"], tokens),
            "cost": used,
            "cost_share": None if used is None or cost is None else ratio(used, cost),
            "deadline": run["deadline_at"],
            "created": run["created_at"],
            "id": run["id"],
        }
        rows.append(row)
    frame = pd.DataFrame(rows, columns=list(RUN_COLUMNS))
    for name in ("deadline", "created"):
        frame[name] = pd.to_datetime(frame[name], utc=True, format="ISO8601")
    return frame


def run_bars_frame(requests: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return one bar per request of a run's trace, in their order. A request that is open has no length yet."""
    rows = []
    for number, one in enumerate(requests):
        duration_ms = one["duration_ms"] or 0.0
        shown = ("outcome", "error_code", "prompt_tokens", "output_tokens", "cost_usd", "request_id", "trace_id")
        row = {
            "row": number,
            "label": f"{one['endpoint'].removeprefix('/v1/')} {one['model']}",
            "start_ms": one["start_ms"],
            "end_ms": one["start_ms"] + duration_ms,
            "duration_ms": duration_ms,
            "who": GATEWAY if one["outcome"] in GOOD else FAILED,
            "attributes": ", ".join(f"{name}={one[name]}" for name in shown if one[name] is not None),
        }
        rows.append(row)
    return pd.DataFrame(rows, columns=list(BAR_COLUMNS))

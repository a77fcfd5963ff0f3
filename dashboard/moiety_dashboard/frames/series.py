"""Usage sums over time, by minute and by hour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import ratio

Rows = Sequence[Mapping[str, Any]]

OUTCOMES = ("served", "disconnected", "rejected", "failed")
COLUMNS = (
    *("slot", "class", "tenant", "requests", *OUTCOMES, "prompt_tokens", "cached_tokens", "output_tokens"),
    *("good_tokens", "tokens_per_s", "good_per_s", "attainment", "ttft_ms", "queue_ms", "preemptions", "seconds"),
)


def minutes_frame(sums: Rows, step: timedelta, now: datetime) -> pd.DataFrame:
    """Return one row per slot and group of GET /usage/minutes; the current slot's rates use its elapsed time."""
    rows = []
    for one in sums:
        totals = one["totals"]
        slot = datetime.fromisoformat(one["at"])
        seconds = seconds_of(slot, step, now)
        row = _row(slot, one["group"], totals, seconds)
        good = totals["good_tokens"]
        row |= {
            "good_tokens": good,
            "good_per_s": good / seconds,
            "attainment": ratio(totals["num_slo_attained"], totals["num_slo_requests"]),
            "queue_ms": totals["mean_queue_ms"],
        }
        rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def hours_frame(groups: Rows, now: datetime) -> pd.DataFrame:
    """Return one row per hour and group of GET /usage by hour; goodput and queue time have no hourly sums."""
    rows = []
    for one in groups:
        group, totals = one["group"], one["totals"]
        slot = datetime.fromisoformat(group["hour"])
        row = _row(slot, group, totals, seconds_of(slot, timedelta(hours=1), now))
        rows.append(row | {"attainment": totals["attainment"]})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def seconds_of(slot: datetime, step: timedelta, now: datetime) -> float:
    """Return the elapsed seconds of a slot; for one that has just begun, at least a quarter of a minute."""
    return max(15.0, min(step, now - slot).total_seconds())


def _row(slot: datetime, group: Mapping[str, Any], totals: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    broken = totals["failed"] + totals["rejected"] + totals["disconnected"]
    return {
        "slot": slot,
        "class": group.get("service_class"),
        "tenant": group.get("tenant_name") or group.get("tenant_id"),
        "served": totals["requests"] - broken,
        "tokens_per_s": totals["output_tokens"] / seconds,
        "seconds": seconds,
        "ttft_ms": totals["mean_ttft_ms"],
        **{name: totals[name] for name in ("requests", "failed", "rejected", "disconnected", "preemptions")},
        **{name: totals[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens")},
    }


def outcomes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return requests per minute by outcome: columns `slot`, `outcome`, `per_minute`."""
    sums = frame.groupby(["slot", "seconds"], as_index=False)[list(OUTCOMES)].sum()
    long = sums.melt(["slot", "seconds"], list(OUTCOMES), var_name="outcome", value_name="requests")
    long["per_minute"] = long["requests"] / (long["seconds"] / 60)
    return long[long["requests"] > 0]


def history(frame: pd.DataFrame, column: str, span: timedelta, step: timedelta, now: datetime) -> list[float]:
    """Return sums of a column over all groups for each slot of the time up to now, for a line without axes.

    Slots without requests are 0; if there are no requests at all, there is no line.
    """
    if frame.empty:
        return []
    sums = frame.groupby("slot")[column].sum()
    last = datetime.fromtimestamp(now.timestamp() // step.total_seconds() * step.total_seconds(), UTC)
    slots = [last - step * number for number in range(span // step, -1, -1)]
    return [float(sums.get(slot, 0.0)) for slot in slots]


def shares(sums: Rows, parts: Sequence[str], whole: str) -> list[float]:
    """Return the parts' share of the whole for each slot that has any, for a line without axes."""
    totals = [one["totals"] for one in sums if one["totals"][whole]]
    return [sum(one[part] for part in parts) / one[whole] for one in totals]


def totals_of(sums: Rows) -> dict[str, float]:
    """Return the sums of a minute report's counts."""
    names = ("requests", "failed", "rejected", "disconnected", "prompt_tokens", "cached_tokens", "output_tokens")
    more = ("good_tokens", "preemptions", "num_slo_attained", "num_slo_requests")
    return {name: sum(one["totals"][name] for one in sums) for name in (*names, *more)}

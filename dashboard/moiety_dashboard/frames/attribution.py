"""Usage of one tenant by end user or by a tag, in total and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import ratio

Rows = Sequence[Mapping[str, Any]]

COLUMNS = ("name", "share", "requests", "failed", "prompt_tokens", "cached_tokens", "output_tokens", "cost")
SLOT_COLUMNS = ("slot", "name", "tokens", "cost")


def attribution_frame(groups: Rows, grouping: str) -> pd.DataFrame:
    """Return one row per value of the grouping, the most tokens first; `name` is None for requests without one.

    `share` is of all tokens, and `cost` is in dollars.
    """
    tokens = sum(_tokens_of(group["totals"]) for group in groups)
    rows = [
        {
            "name": group["group"][grouping],
            "share": ratio(_tokens_of(group["totals"]), tokens),
            "cost": group["totals"]["cost_nanodollars"] / 1e9,
            **{name: group["totals"][name] for name in COLUMNS if name in group["totals"]},
        }
        for group in groups
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.sort_values(["share", "name"], ascending=[False, True], ignore_index=True)


def slots_frame(groups_of: Mapping[str, Rows], since: datetime, step: timedelta) -> pd.DataFrame:
    """Return tokens and cost in dollars per slot of `step` and name, from each name's sums by the hour or the day."""
    found: dict[tuple[datetime, str], dict[str, float]] = {}
    for name, groups in groups_of.items():
        for group in groups:
            slot = since + (_start_of(group["group"]) - since) // step * step
            sums = found.setdefault((slot, name), {"tokens": 0, "cost": 0.0})
            sums["tokens"] += _tokens_of(group["totals"])
            sums["cost"] += group["totals"]["cost_nanodollars"] / 1e9
    rows = [{"slot": slot, "name": name, **sums} for (slot, name), sums in sorted(found.items())]
    return pd.DataFrame(rows, columns=list(SLOT_COLUMNS))


def tag_names(requests: Rows) -> list[str]:
    """Return the names of the requests' tags, the most frequent first."""
    counts: dict[str, int] = {}
    for request in requests:
        for name in request["tags"]:
            counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: (-counts[name], name))


def _start_of(group: Mapping[str, str]) -> datetime:
    if "hour" in group:
        return datetime.fromisoformat(group["hour"])
    return datetime.fromisoformat(group["day"]).replace(tzinfo=UTC)


def _tokens_of(totals: Mapping[str, Any]) -> int:
    return int(totals["prompt_tokens"] + totals["output_tokens"])

"""Spend: by group and by day, and budgets with their burn-down. Pure; amounts of frames are in dollars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, tzinfo
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import moment, ratio, show_time
from moiety_dashboard.frames.limits import KINDS

Rows = Sequence[Mapping[str, Any]]

COLUMNS = (
    *("name", "share", "requests", "prompt_tokens", "cached_tokens", "output_tokens", "before_credits", "credit"),
    *("cost", "id"),
)
DAY_COLUMNS = ("slot", "name", "cost")
BUDGET_COLUMNS = (
    *("scope", "limit", "share", "used", "cap", "forecast", "per_day", "exhausted_at", "ends", "quota_id"),
)
BURN_COLUMNS = ("slot", "name", "remaining")
REMAINING, PREDICTED = "remaining", "at the present rate"


def in_dollars(nanodollars: float) -> float:
    """Return an amount in dollars."""
    return nanodollars / 1e9


def spend_frame(groups: Rows, field: str, whole: int, names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per group, the largest cost first.

    `field` is the group's value in the API's answer, such as tenant_id; `whole` is the cost of all in nano-dollars, of
    which `share` is a part. `name` is None for requests without an end user or tag.
    """
    rows = [
        {
            "id": group["group"][field],
            "name": names.get(group["group"][field], group["group"][field]),
            "share": ratio(group["totals"]["cost_nanodollars"], whole),
            "before_credits": in_dollars(group["totals"]["cost_before_credits_nanodollars"]),
            "credit": in_dollars(group["totals"]["credit_nanodollars"]),
            "cost": in_dollars(group["totals"]["cost_nanodollars"]),
            **{name: group["totals"][name] for name in COLUMNS if name in group["totals"]},
        }
        for group in groups
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.sort_values(["cost", "requests"], ascending=False, ignore_index=True)


def days_frame(groups: Mapping[str, Rows]) -> pd.DataFrame:
    """Return the cost of each day and name, from each name's spend by the day."""
    rows = [
        {
            "slot": datetime.fromisoformat(f"{group['group']['day']}T00:00:00+00:00"),
            "name": name,
            "cost": in_dollars(group["totals"]["cost_nanodollars"]),
        }
        for name, of_days in groups.items()
        for group in of_days
    ]
    return pd.DataFrame(rows, columns=list(DAY_COLUMNS))


def budgets_frame(budgets: Rows, names: Mapping[str, str], zone: tzinfo) -> pd.DataFrame:
    """Return one row per limit on money, the most used first."""
    rows = [
        {
            "scope": f"{one['level']} {names.get(one['scope_id'], one['scope_id'])}",
            "limit": KINDS.get(one["kind"], one["kind"]),
            "share": ratio(one["used_nanodollars"], one["cap_nanodollars"]),
            "used": in_dollars(one["used_nanodollars"]),
            "cap": in_dollars(one["cap_nanodollars"]),
            "forecast": in_dollars(one["forecast_nanodollars"]),
            "per_day": in_dollars(one["rate_nanodollars_per_day"]),
            "exhausted_at": _exhausted(one, zone),
            "ends": moment(one["window_end"]),
            "quota_id": one["quota_id"],
        }
        for one in budgets
    ]
    frame = pd.DataFrame(rows, columns=list(BUDGET_COLUMNS))
    return frame.sort_values(["share", "scope"], ascending=[False, True], ignore_index=True)


def _exhausted(budget: Mapping[str, Any], zone: tzinfo) -> str | None:
    """Return when the cap is reached at the present rate; of a used-up budget the API says the time of its answer."""
    is_over = budget["used_nanodollars"] >= budget["cap_nanodollars"]
    return "already" if is_over else show_time(budget["exhausted_at"], zone)


def burn_frame(budget: Mapping[str, Any]) -> pd.DataFrame:
    """Return what was left of a budget over its window, and from its last point on what will be left at its rate."""
    points = [(datetime.fromisoformat(one["at"]), one["remaining_nanodollars"]) for one in budget["burn_down"]]
    rows = [{"slot": at, "name": REMAINING, "remaining": in_dollars(left)} for at, left in points]
    at, left = points[-1]
    end = datetime.fromisoformat(budget["window_end"])
    days = (end - at).total_seconds() / 86400
    for moment_of, amount in ((at, left), (end, left - budget["rate_nanodollars_per_day"] * days)):
        rows.append({"slot": moment_of, "name": PREDICTED, "remaining": in_dollars(amount)})
    return pd.DataFrame(rows, columns=list(BURN_COLUMNS))

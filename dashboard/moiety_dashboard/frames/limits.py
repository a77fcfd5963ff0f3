"""Quotas and rate limits: their usage, their remaining time at the current pace, and the effect of another cap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pandas as pd

from moiety_dashboard.formatting import dollars, moment, percent, ratio, short, time_left

Rows = Sequence[Mapping[str, Any]]

TOKEN_COUNTS = "token_counts_per_minute"
KINDS = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "concurrent_requests": "concurrent requests",
    "tokens_per_day": "tokens per day",
    "tokens_per_month": "tokens per month",
    "money_per_day": "dollars per day",
    "money_per_month": "dollars per month",
    TOKEN_COUNTS: "token counts per minute",
}
COLUMNS = (
    "scope",
    "limit",
    "cap",
    "used",
    "reserved",
    "share",
    "lasts",
    "resets",
    "alerts",
    "quota_id",
    "use",
    "of",
    "level",
    "exhausted",
)


@dataclass(frozen=True, slots=True)
class UsageRate:
    """Recent usage: amounts over a number of seconds."""

    seconds: float
    requests: float = 0
    tokens: float = 0
    nanodollars: float = 0

    @classmethod
    def of(cls, totals: Mapping[str, Any], seconds: float) -> UsageRate:
        tokens = totals["prompt_tokens"] + totals["output_tokens"]
        return cls(seconds, totals["requests"] - totals["rejected"], tokens, totals["cost_nanodollars"])

    def __add__(self, other: UsageRate) -> UsageRate:
        return UsageRate(
            self.seconds,
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.nanodollars + other.nanodollars,
        )

    def per_request(self, kind: str) -> float:
        """Return the mean amount of a request, in the unit of a limit of that kind; the least amount without usage."""
        if not kind.startswith(("tokens", "money")) or self.requests <= 0:
            return 1.0
        return max(1.0, (self.nanodollars if is_money(kind) else self.tokens) / self.requests)

    def per_second(self, kind: str) -> float:
        """Return the usage per second, in the unit of a limit of that kind."""
        if is_money(kind):
            return self.nanodollars / self.seconds
        return (self.requests if kind.startswith("requests") else self.tokens) / self.seconds


def num_rejected(groups: Rows) -> int:
    """Return the number of rejected requests of all groups of the usage."""
    return sum(one["totals"]["rejected"] for one in groups)


def usage_rates(groups: Rows, seconds: float) -> dict[str, UsageRate]:
    """Return the pace of each tenant, project and key, by its id."""
    found: dict[str, UsageRate] = {}
    for one in groups:
        pace = UsageRate.of(one["totals"], seconds)
        for name in ("tenant_id", "project_id", "key_id"):
            scope = one["group"].get(name)
            if scope is not None:
                found[scope] = found.get(scope, UsageRate(seconds)) + pace
    return found


def newest_keys(keys: Rows) -> dict[str, str]:
    """Return the id of the newest successor of each rotated key; the quotas of all have the id of the first one."""
    next_ids = {key["id"]: key["replaced_by"] for key in keys if key["replaced_by"] is not None}
    found: dict[str, str] = {}
    for key_id in next_ids:
        passed: list[str] = []
        newest = key_id
        while newest in next_ids and newest not in found and len(passed) < len(next_ids):
            passed.append(newest)
            newest = next_ids[newest]
        found |= dict.fromkeys(passed, found.get(newest, newest))
    return found


def is_stock(kind: str) -> bool:
    return kind.endswith(("_day", "_month"))


def is_rate(kind: str) -> bool:
    return kind.endswith("_minute")


def is_money(kind: str) -> bool:
    return kind.startswith("money")


def amount(kind: str, number: float | None) -> str:
    """Format a number in the unit of the kind, for people."""
    return dollars(number) if is_money(kind) else short(number)


def in_words(quota: Mapping[str, Any]) -> str:
    """Return the cap of a quota with its unit and period."""
    return f"{amount(quota['kind'], quota['cap'])} {KINDS[quota['kind']].removeprefix('dollars ')}"


def is_exhausted(quota: Mapping[str, Any], pace: UsageRate | None, cap: float | None = None) -> bool:
    """Return whether less is left than a mean request needs, so that such requests are rejected.

    A quota is seldom used up to the last token: requests are rejected from where the next one does not fit.
    """
    left = (quota["cap"] if cap is None else cap) - quota["used"]
    return bool(left < (1.0 if pace is None else pace.per_request(quota["kind"])))


def lasts_s(quota: Mapping[str, Any], pace: UsageRate | None, cap: float | None = None) -> float | None:
    """Return the seconds until a quota's cap is used up at that pace; None if it will not be."""
    if not is_stock(quota["kind"]) or pace is None:
        return None
    speed = pace.per_second(quota["kind"])
    left = (quota["cap"] if cap is None else cap) - quota["used"]
    if is_exhausted(quota, pace, cap):
        return 0.0
    return left / speed if speed > 0 else None


def quotas_frame(
    quotas: Rows, names: Mapping[str, str], by_scope: Mapping[str, UsageRate], now: datetime
) -> pd.DataFrame:
    """Return one row per limit, the nearest to its end first. `names` maps ids of tenants, projects and keys."""
    rows = []
    for quota in quotas:
        kind = quota["kind"]
        resets = moment(quota["resets_at"])
        pace = by_scope.get(quota["scope_id"])
        seconds = lasts_s(quota, pace)
        rows.append(
            {
                "scope": f"{quota['level']} {names.get(quota['scope_id'], quota['scope_id'])}",
                "limit": KINDS.get(kind, kind),
                "cap": amount(kind, quota["cap"]),
                "used": amount(kind, quota["used"]),
                "reserved": amount(kind, quota["reserved"]) if quota["reserved"] else "",
                "share": ratio(quota["used"], quota["cap"]) or (0.0 if quota["cap"] else 1.0),
                "lasts": _lasts(kind, seconds, resets, now),
                "resets": "" if resets is None or resets <= now else f"in {time_left((resets - now).total_seconds())}",
                "alerts": ", ".join(f"{percent} %" for percent in quota.get("alert_at", ())) or None,
                "quota_id": quota["id"],
                "use": quota["used"],
                "of": quota["cap"],
                "level": quota["level"],
                "exhausted": is_exhausted(quota, pace),
            }
        )
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.sort_values(["exhausted", "share", "scope"], ascending=[False, False, True], ignore_index=True)


def _lasts(kind: str, seconds: float | None, resets: datetime | None, now: datetime) -> str:
    if not is_stock(kind):
        return ""
    if seconds == 0:
        return "exhausted"
    if seconds is None or (resets is not None and seconds > (resets - now).total_seconds()):
        return "after its reset"
    return time_left(seconds)


def preview(kind: str, cap: int, current: Mapping[str, Any] | None, pace: UsageRate | None, now: datetime) -> list[str]:
    """Return the effects of a cap, sentence by sentence. `current` is the limit that it would replace."""
    effects = [_change(kind, cap, current)]
    if cap == 0:
        rejected = "requests that count tokens" if kind == TOKEN_COUNTS else "requests"
        return [*effects, f"**All {rejected} are rejected** with 429."]
    if kind == TOKEN_COUNTS:
        return [*effects, "Requests that count tokens are not part of the recorded usage."]
    if is_rate(kind):
        return effects + _preview_rate(kind, cap, pace)
    if not is_stock(kind):
        open_now = current["used"] if current else None
        return effects + ([] if open_now is None else [f"Open or reserved now: {short(open_now)}."])
    return effects + _preview_stock(kind, cap, current, pace, now)


def _change(kind: str, cap: int, current: Mapping[str, Any] | None) -> str:
    new = f"{amount(kind, cap)} {KINDS[kind].removeprefix('dollars ')}"
    if current is None:
        return f"New quota: {new}."
    if current["cap"] == cap:
        return f"Unchanged: {new}."
    return f"Changes from {amount(kind, current['cap'])} to {new}."


def _preview_rate(kind: str, cap: int, pace: UsageRate | None) -> list[str]:
    if pace is None or not pace.requests:
        return ["No usage in the last one to two hours."]
    mean = pace.per_second(kind) * 60
    usage = f"Mean usage of the last one to two hours: {short(mean)} per minute, {percent(mean / cap)} of the cap."
    return [usage, "**Requests would be rejected** with 429, or wait."] if mean > cap else [usage]


def _preview_stock(
    kind: str, cap: int, current: Mapping[str, Any] | None, pace: UsageRate | None, now: datetime
) -> list[str]:
    effects = []
    used = current["used"] if current else 0
    resets = moment(current["resets_at"]) if current else None
    if current:
        effects.append(f"Used in this window: {amount(kind, used)}, {percent(used / cap)} of the cap.")
    if is_exhausted({"kind": kind, "cap": cap, "used": used}, pace):
        until = "" if resets is None else f" until {resets:%Y-%m-%d %H:%M} UTC"
        return [
            *effects,
            f"**The quota is already exhausted**: requests of the usual size are rejected with 429{until}.",
        ]
    speed = 0.0 if pace is None else pace.per_second(kind)
    if speed <= 0:
        return [*effects, "No usage in the last one to two hours, so the quota is not exhausted."]
    left_s = (cap - used) / speed
    rate = f"At the usage rate of the last one to two hours ({amount(kind, speed * 3600)} per hour)"
    if resets is not None and left_s > (resets - now).total_seconds():
        return [*effects, f"{rate} the quota lasts until its reset."]
    return [*effects, f"{rate} the quota is **exhausted in {time_left(left_s)}**."]


def leases_frame(leases: Rows, names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per gateway's lease of a limit."""
    rows = [
        {
            "state": lease["state"],
            "scope": f"{lease['level']} {names.get(lease['scope_id'], lease['scope_id'])}",
            "limit": KINDS.get(lease["kind"], lease["kind"]),
            "gateway": lease["replica_id"],
            "granted": amount(lease["kind"], lease["granted"]),
            "settled": amount(lease["kind"], lease["settled"]),
            "left": amount(lease["kind"], lease["left"]),
            "of": amount(lease["kind"], lease["cap"]),
            "expires": moment(lease["expires_at"]),
        }
        for lease in leases
    ]
    columns = ["state", "scope", "limit", "gateway", "granted", "settled", "left", "of", "expires"]
    return pd.DataFrame(rows, columns=columns)

"""Errors of quotas and rate limits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from moiety_platform.db.failures import RETRY_AFTER_S
from moiety_platform.errors import RateLimited, RequestExceedsQuota, Unavailable
from moiety_platform.quota.kinds import NANO, Limit, Meter, Unit, window_end
from moiety_platform.quota.lease import WindowId

SLOT_RETRY_S = 1.0


class QuotaExceeded(RateLimited):
    """A limit has only `available` of its `unit` left for the request.

    `retry_after_s` is the expected time until more is available.
    """

    default_code = "quota_exceeded"

    def __init__(self, message: str, *, unit: Unit, available: int, code: str | None, retry_after_s: float) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)
        self.unit = unit
        self.available = available


def store_unavailable() -> Unavailable:
    return Unavailable(
        "Limits cannot be checked right now; try again shortly.",
        code="store_unavailable",
        retry_after_s=RETRY_AFTER_S,
    )


def never_fits(limit: Limit, needed: int) -> RequestExceedsQuota:
    """Return the refusal of a request that needs more of a limit than the limit's whole cap."""
    if limit.cap == 0:
        why = "allows no request at all. Have the limit raised"
    else:
        amount = f"$ {needed / NANO:,.6f}" if limit.kind.unit is Unit.MONEY else f"{needed:,}"
        why = f"can never allow this request, which needs at least {amount}. Make it smaller, or have the limit raised"
    return RequestExceedsQuota(f"The {limit.scope.level}'s limit of {shown(limit)} {why}")


def exceeded(limit: Limit, window: WindowId, *, available: int, short: int, now: datetime) -> QuotaExceeded:
    """Return the refusal of a request that fits only `available` of its amount, with `short` lacking for the rest."""
    kind, whose = limit.kind, f"The {limit.scope.level}'s limit of {shown(limit)}"
    if kind.meter is Meter.SLOTS:
        return QuotaExceeded(
            f"{whose} is reached. Wait until one of the running requests has ended, or have the limit raised",
            unit=kind.unit, available=available, code="concurrency_limit_exceeded", retry_after_s=SLOT_RETRY_S,
        )  # fmt: skip
    if kind.meter is Meter.RATE:
        wait_s = max(1.0, short * 60 / limit.cap) if limit.cap else 60.0
        return QuotaExceeded(
            f"{whose} does not allow this request now. Try again in {wait_s:.0f} s, or have the limit raised",
            unit=kind.unit, available=available, code="rate_limit_exceeded", retry_after_s=wait_s,
        )  # fmt: skip
    assert kind.period is not None, "a stock has a period"
    resets_at = window_end(kind.period, window.start)
    return QuotaExceeded(
        f"{whose} does not allow this request. It is renewed at {resets_at:%Y-%m-%d %H:%M} UTC; ask for fewer tokens, "
        "or have the limit raised",
        unit=kind.unit, available=available, code=None,
        retry_after_s=max(1.0, (resets_at - now).total_seconds()),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LimitRefusal:
    """Refusal by a limit that has less left than a hold lacks.

    `short` is the missing part; `available` is how much more the hold could have.
    """

    limit: Limit
    window: WindowId
    available: int
    short: int

    def error(self, now: datetime) -> QuotaExceeded:
        return exceeded(self.limit, self.window, available=self.available, short=self.short, now=now)


def shown(limit: Limit) -> str:
    """Return a limit for messages: `100 tokens_per_day`, `$ 12.50 money_per_month`."""
    amount = f"$ {limit.cap / NANO:,.2f}" if limit.kind.unit is Unit.MONEY else str(limit.cap)
    return f"{amount} {limit.kind}"

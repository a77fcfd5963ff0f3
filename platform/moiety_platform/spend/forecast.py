"""Forecast of spend, from the sums of past days. Pure; amounts are nano-dollars, times are UTC.

The rate is the mean of the last seven whole days and of today so far. For a group whose first spend of the last four
weeks is more recent, it is the mean since the day of that spend, and at least of one day. The forecast is the spend so
far plus the rate for the rest of the time. It knows no weekends and no trend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from moiety_platform.quota.kinds import Period, window_end, window_start
from moiety_platform.usage.days import day_of

LOOKBACK = timedelta(days=28)
RATE_SPAN = timedelta(days=7)
MAX_DAYS = 366
_DAY_S = 24 * 3600

DailySpend = Mapping[datetime, int]
"""Spend of each day with spend, by the start of the day."""


@dataclass(frozen=True, slots=True)
class SpendRate:
    """Spend per day, and the day since which it is the mean; None without any spend."""

    nanodollars_per_day: int
    since: datetime | None

    def spend_in(self, span: timedelta) -> int:
        """Return the spend in a time, rounded down; 0 for a time that is over."""
        return self.nanodollars_per_day * max(0, round(span.total_seconds())) // _DAY_S

    def time_for(self, amount: int) -> timedelta | None:
        """Return the time until this amount is spent; None at a rate of 0, and for a time of more than a year."""
        if amount <= 0:
            return timedelta()
        if amount > MAX_DAYS * self.nanodollars_per_day:
            return None
        return timedelta(seconds=amount * _DAY_S // self.nanodollars_per_day)


@dataclass(frozen=True, slots=True)
class MonthForecast:
    """Spend of a month so far, and the forecast for all of it."""

    start: datetime
    end: datetime
    spent: int
    rate: SpendRate
    total: int


def read_since(now: datetime) -> datetime:
    """Return the first day whose spend the functions of this module need."""
    return min(window_start(Period.MONTH, now), day_of(now) - LOOKBACK)


def rate_of(spent: DailySpend, now: datetime) -> SpendRate:
    """Return the rate of spend, from the days since `read_since`."""
    today = day_of(now)
    first = min((day for day, amount in spent.items() if amount and today - LOOKBACK <= day <= today), default=None)
    if first is None:
        return SpendRate(0, None)
    since = max(first, today - RATE_SPAN)
    amount = sum(amount for day, amount in spent.items() if since <= day <= today)
    elapsed_s = max(round((now - since).total_seconds()), _DAY_S)
    return SpendRate(max(amount, 0) * _DAY_S // elapsed_s, since)


def forecast_month(spent: DailySpend, now: datetime) -> MonthForecast:
    """Return the forecast of the month that contains `now`, from the days since `read_since`."""
    start = window_start(Period.MONTH, now)
    end = window_end(Period.MONTH, start)
    so_far = sum(amount for day, amount in spent.items() if start <= day < end)
    rate = rate_of(spent, now)
    return MonthForecast(start, end, so_far, rate, so_far + rate.spend_in(end - now))

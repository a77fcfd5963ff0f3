"""Response schemas of the admin API for spend. Amounts are nano-dollars."""

from __future__ import annotations

from datetime import datetime

import msgspec

from moiety_platform.db.paging import Page
from moiety_platform.spend.forecast import MonthForecast


class SpendTotals(msgspec.Struct, frozen=True):
    """Spend of a group, and the requests and tokens that it paid for."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    speculative_tokens: int  # prefilled speculatively; billed like prompt tokens that are not cached
    cost_before_credits_nanodollars: int
    credit_nanodollars: int  # for missed guarantees of quotes
    cost_nanodollars: int  # what is billed

    def plus(self, other: SpendTotals) -> SpendTotals:
        """Return the sums of both."""
        return SpendTotals(
            *(
                mine + its
                for mine, its in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
            )
        )


class SpendGroup(msgspec.Struct, frozen=True):
    """Spend of one group. `group` holds e.g. `tenant_id` and `tenant_name`, `model`, or `day`."""

    group: dict[str, str | None]
    totals: SpendTotals


class SpendReport(msgspec.Struct, frozen=True):
    """Spend in a time span. `total` is of all groups; `truncated` says that there are more than are listed."""

    since: datetime
    until: datetime
    total: SpendTotals
    data: list[SpendGroup]
    truncated: bool


class DaySpend(msgspec.Struct, frozen=True):
    """Spend of one day."""

    day: datetime
    cost_nanodollars: int


class SpendForecast(msgspec.Struct, frozen=True):
    """Spend of this month so far, and its forecast: `spent` plus the daily rate for the rest of the month.

    `rate_since` is the day since which the rate is the mean; null without any spend. `days` are the days of the month
    that have spend.
    """

    month_start: datetime
    month_end: datetime
    spent_nanodollars: int
    rate_nanodollars_per_day: int
    rate_since: datetime | None
    forecast_nanodollars: int
    days: list[DaySpend]

    @classmethod
    def of(cls, found: MonthForecast, days: list[DaySpend]) -> SpendForecast:
        return cls(
            month_start=found.start,
            month_end=found.end,
            spent_nanodollars=found.spent,
            rate_nanodollars_per_day=found.rate.nanodollars_per_day,
            rate_since=found.rate.since,
            forecast_nanodollars=found.total,
            days=days,
        )


class BudgetPoint(msgspec.Struct, frozen=True):
    """Remainder of a budget at a time; negative where more was spent than the budget."""

    at: datetime
    remaining_nanodollars: int


class BudgetView(msgspec.Struct, frozen=True):
    """A limit on money, and how it is being used up.

    `used_nanodollars` is what the limit has counted in its window: the requests since it was set, and of those only
    what is settled. `spent_nanodollars` is the spend of its scope in the whole window, from usage; `burn_down` is the
    cap less this spend, at the start of the window, at the end of each of its days (of a daily budget: hours) with
    spend, and now. `exhausted_at` is when the cap is used up at the rate of spend; null if that is not before the
    window's end.
    """

    quota_id: str
    level: str
    scope_id: str
    kind: str
    cap_nanodollars: int
    used_nanodollars: int
    window_start: datetime
    window_end: datetime
    spent_nanodollars: int
    rate_nanodollars_per_day: int
    forecast_nanodollars: int  # used by the window's end
    exhausted_at: datetime | None
    burn_down: list[BudgetPoint]


class BudgetPage(Page[BudgetView], frozen=True):
    """A page of budgets, oldest first; `next_cursor` is null on the last page."""

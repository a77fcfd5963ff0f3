"""Limits and their kinds, on three levels. Pure.

There are three meters: a *stock* is an amount within a window of UTC time, booked as it is used up; a *rate* refills
steadily; *slots* are taken for as long as a request is open.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

import msgspec

from moiety_platform.prices.token_cost import dollars

MAX_CAP = 2**62  # so that sums of two fit into 64 bits
MAX_RATE = 10**12  # per minute, so that a rate's arithmetic fits
NANO = 10**9
ALWAYS = datetime(1970, 1, 1, tzinfo=UTC)  # start of the single window of limits without windows


class LimitLevel(StrEnum):
    """Level of a limit. A request must fit under all limits of its tenant, its project and its key."""

    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"


class Unit(StrEnum):
    __hash__ = str.__hash__  # the same hash, without a Python call: amounts are looked up by unit very often

    TOKENS = "tokens"
    REQUESTS = "requests"
    MONEY = "nano-dollars"
    SLOTS = "open requests"
    TOKEN_COUNTS = "token counts"


class Meter(StrEnum):
    STOCK = "stock"
    RATE = "rate"
    SLOTS = "slots"


class Period(StrEnum):
    DAY = "day"
    MONTH = "month"


class LimitKind(StrEnum):
    """Kind of a limit: its unit, its meter, and the period of a stock."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    TOKEN_COUNTS_PER_MINUTE = "token_counts_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    MONEY_PER_DAY = "money_per_day"
    MONEY_PER_MONTH = "money_per_month"

    unit: Unit
    meter: Meter
    period: Period | None

    __hash__ = str.__hash__


for _kind, _terms in {
    LimitKind.REQUESTS_PER_MINUTE: (Unit.REQUESTS, Meter.RATE, None),
    LimitKind.TOKENS_PER_MINUTE: (Unit.TOKENS, Meter.RATE, None),
    LimitKind.CONCURRENT_REQUESTS: (Unit.SLOTS, Meter.SLOTS, None),
    LimitKind.TOKEN_COUNTS_PER_MINUTE: (Unit.TOKEN_COUNTS, Meter.RATE, None),
    LimitKind.TOKENS_PER_DAY: (Unit.TOKENS, Meter.STOCK, Period.DAY),
    LimitKind.TOKENS_PER_MONTH: (Unit.TOKENS, Meter.STOCK, Period.MONTH),
    LimitKind.MONEY_PER_DAY: (Unit.MONEY, Meter.STOCK, Period.DAY),
    LimitKind.MONEY_PER_MONTH: (Unit.MONEY, Meter.STOCK, Period.MONTH),
}.items():
    _kind.unit, _kind.meter, _kind.period = _terms


class Scope(msgspec.Struct, frozen=True):
    """A tenant, a project or a key."""

    level: LimitLevel
    id: str


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of one scope."""

    quota_id: str
    scope: Scope
    kind: LimitKind
    cap: int


def window_start(period: Period | None, now: datetime) -> datetime:
    """Return the start of the window that contains `now`, in UTC."""
    if period is None:
        return ALWAYS
    today = now.astimezone(UTC)
    return _midnight(today.year, today.month, today.day if period is Period.DAY else 1)


@functools.lru_cache(maxsize=64)
def _midnight(year: int, month: int, day: int) -> datetime:
    return datetime(year, month, day, tzinfo=UTC)


@functools.lru_cache(maxsize=64)
def window_end(period: Period, start: datetime) -> datetime:
    """Return the end of the window that began at `start`, which is the start of the next."""
    if period is Period.DAY:
        return start + timedelta(days=1)
    return (start.replace(day=1) + timedelta(days=32)).replace(day=1)


def show_amount(kind: LimitKind, amount: int) -> str:
    """Return an amount of a limit for people: dollars of money, and other counts with separators."""
    return f"${dollars(amount)}" if kind.unit is Unit.MONEY else f"{amount:,d}"

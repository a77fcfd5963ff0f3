"""What a limit can limit: amounts of a unit within a window of UTC time, on one of three levels. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

MAX_CAP = 2**62  # so that sums of two fit into 64 bits


class Level(StrEnum):
    """Where a limit stands. A request needs room under all limits of its tenant, its project and its key."""

    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"


class Unit(StrEnum):
    TOKENS = "tokens"


class Period(StrEnum):
    DAY = "day"
    MONTH = "month"


class Kind(StrEnum):
    """What a limit counts, and for how long."""

    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"

    @property
    def unit(self) -> Unit:
        return Unit.TOKENS

    @property
    def period(self) -> Period:
        return Period.DAY if self is Kind.TOKENS_PER_DAY else Period.MONTH


@dataclass(frozen=True, slots=True)
class Scope:
    """A tenant, a project or a key."""

    level: Level
    id: str


def window_start(period: Period, now: datetime) -> datetime:
    """When the window that `now` lies in began, in UTC."""
    day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return day if period is Period.DAY else day.replace(day=1)


def window_end(period: Period, start: datetime) -> datetime:
    """When the window that began at `start` ends and the next begins."""
    if period is Period.DAY:
        return start + timedelta(days=1)
    return (start.replace(day=1) + timedelta(days=32)).replace(day=1)

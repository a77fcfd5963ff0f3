"""Time spans of reports and lists, as clients request them with `since` and `until`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from litestar.di import NamedDependency
from litestar.params import SkipValidation

from moiety_platform.errors import BadRequest
from moiety_platform.query_parameters import Since, Until, parse_moment
from moiety_platform.tenants.checks import check_moment

DEFAULT_SPAN = timedelta(hours=24)
_EARLIEST = datetime(1, 1, 1, tzinfo=UTC) + DEFAULT_SPAN  # before which a span of that length has no beginning


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Time span [since, until)."""

    since: datetime
    until: datetime


TimeSpanDependency = NamedDependency[SkipValidation[TimeSpan]]


def parse_time_span(now: NamedDependency[datetime], since: Since = None, until: Until = None) -> TimeSpan:
    """Return the requested period; the last 24 hours if no time is given. Raises BadRequest.

    It provides the dependency `period` of the handlers that take a `TimeSpanDependency`.
    """
    begin, end = _moment(since, "since"), _moment(until, "until") or now + timedelta(seconds=1)
    start = begin or max(end, _EARLIEST) - DEFAULT_SPAN
    if start >= end:
        raise BadRequest(
            f"'since' ({start:%Y-%m-%dT%H:%M:%SZ}) must be before 'until' ({end:%Y-%m-%dT%H:%M:%SZ}).", param="since"
        )
    return TimeSpan(start, end)


def _moment(text: str | None, param: str) -> datetime | None:
    moment = parse_moment(text, param)
    return None if moment is None else check_moment(moment, param)

"""Request and response schemas of the admin API for limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

import msgspec

from moiety_platform.db.paging import Page
from moiety_platform.etags import Tagged
from moiety_platform.openapi.schemas import shows
from moiety_platform.quota.bucket import Bucket
from moiety_platform.quota.kinds import MAX_CAP, MAX_RATE, LimitKind, LimitLevel, Meter, window_end, window_start
from moiety_platform.quota.models import Quota, QuotaRate, QuotaWindow
from moiety_wire.shared_fields import copy_fields

MAX_THRESHOLDS = 5

Percent = Annotated[int, shows(minimum=1, maximum=100)]


class NewQuota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limit to set; it replaces one of the same scope and kind.

    `alert_at` are percents of the cap, 1 to 100, at which alerts go to webhooks; without it the existing ones stay, and
    an empty list removes them.
    """

    rules: ClassVar[Sequence[Mapping[str, Any]]] = (
        {
            "if": {"properties": {"kind": {"enum": [kind for kind in LimitKind if kind.meter is Meter.STOCK]}}},
            "then": {"properties": {"cap": {"maximum": MAX_CAP}}},
            "else": {"properties": {"cap": {"maximum": MAX_RATE}, "alert_at": {"maxItems": 0}}},
        },
    )

    level: LimitLevel
    scope_id: str
    kind: LimitKind
    cap: Annotated[int, shows(minimum=0)]
    alert_at: Annotated[list[Percent], shows(maxItems=MAX_THRESHOLDS)] | msgspec.UnsetType = msgspec.UNSET


class QuotaCaps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Caps of quotas by their kinds; of a kind without a cap there is no quota. Amounts of money are nano-dollars."""

    requests_per_minute: Annotated[int, shows(minimum=0, maximum=MAX_RATE)] | None = None
    tokens_per_minute: Annotated[int, shows(minimum=0, maximum=MAX_RATE)] | None = None
    concurrent_requests: Annotated[int, shows(minimum=0, maximum=MAX_RATE)] | None = None
    token_counts_per_minute: Annotated[int, shows(minimum=0, maximum=MAX_RATE)] | None = None
    tokens_per_day: Annotated[int, shows(minimum=0, maximum=MAX_CAP)] | None = None
    tokens_per_month: Annotated[int, shows(minimum=0, maximum=MAX_CAP)] | None = None
    money_per_day: Annotated[int, shows(minimum=0, maximum=MAX_CAP)] | None = None
    money_per_month: Annotated[int, shows(minimum=0, maximum=MAX_CAP)] | None = None


def caps_by_kind(caps: QuotaCaps | None) -> dict[LimitKind, int]:
    """Return the caps that are given."""
    found = {} if caps is None else {kind: getattr(caps, kind) for kind in LimitKind}
    return {kind: cap for kind, cap in found.items() if cap is not None}


class QuotaView(Tagged, frozen=True):
    """A limit and its use.

    For a stock, `used` is settled in the current window, and `reserved` is leased to gateways for running and future
    requests; the cap less both is left to lease. For a rate, `used` is what has not been refilled yet; at `resets_at`
    it is 0. For open requests, `used` counts running requests and the slots that gateways keep for more. Amounts of
    money are nano-dollars. `alert_at` are the percents of the cap that trigger alerts, `alerted` those that were passed
    in the current window.
    """

    transient: ClassVar[frozenset[str]] = frozenset({"used", "reserved", "window_start", "resets_at"})

    id: str
    level: str
    scope_id: str
    kind: str
    cap: int
    used: int
    reserved: int
    window_start: datetime | None
    resets_at: datetime | None
    created_at: datetime
    alert_at: tuple[int, ...] = ()
    alerted: tuple[int, ...] = ()


def window_view(quota: Quota, window: QuotaWindow | None, now: datetime) -> QuotaView:
    """Return the view of a stock or of a limit on open requests."""
    settled, granted = (window.settled, window.granted) if window is not None else (0, 0)
    period = LimitKind(quota.kind).period
    if period is None:
        return _view(quota, granted, 0, None, None)
    start = window_start(period, now)
    return _view(quota, settled, granted - settled, start, window_end(period, start))


def rate_view(quota: Quota, rate: QuotaRate, now_ms: int) -> QuotaView:
    """Return the view of a rate; `now_ms` is by the database's clock."""
    bucket = Bucket(quota.cap, rate.debt, rate.at_ms).at(now_ms)
    whole_at = datetime.fromtimestamp((now_ms + bucket.debt // max(1, quota.cap)) / 1000, UTC)
    return _view(quota, quota.cap - bucket.remaining, 0, None, whole_at)


def _view(quota: Quota, used: int, reserved: int, start: datetime | None, resets_at: datetime | None) -> QuotaView:
    return copy_fields(
        quota,
        QuotaView,
        used=used,
        reserved=reserved,
        window_start=start,
        resets_at=resets_at,
        alert_at=(),
        alerted=(),
    )


class QuotaPage(Page[QuotaView], frozen=True):
    """A page of limits, oldest first; `next_cursor` is null on the last page."""

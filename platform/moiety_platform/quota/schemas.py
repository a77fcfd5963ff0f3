"""What the admin API says and hears of limits."""

from __future__ import annotations

from datetime import datetime

import msgspec

from moiety_platform.quota.kinds import Kind, Level, window_end
from moiety_platform.quota.models import Quota, QuotaWindow


class NewQuota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limit to be set; one of the same scope and kind is replaced."""

    level: Level
    scope_id: str
    kind: Kind
    cap: int


class QuotaView(msgspec.Struct, frozen=True):
    """A limit and its window of now. `used` is settled; `reserved` is leased to gateways, for requests that run or are
    to come; what is left to lease is the cap less both."""

    id: str
    level: str
    scope_id: str
    kind: str
    cap: int
    used: int
    reserved: int
    window_start: datetime
    resets_at: datetime
    created_at: datetime

    @classmethod
    def of(cls, quota: Quota, start: datetime, window: QuotaWindow | None) -> QuotaView:
        settled, granted = (window.settled, window.granted) if window is not None else (0, 0)
        return cls(
            id=quota.id,
            level=quota.level,
            scope_id=quota.scope_id,
            kind=quota.kind,
            cap=quota.cap,
            used=settled,
            reserved=granted - settled,
            window_start=start,
            resets_at=window_end(Kind(quota.kind).period, start),
            created_at=quota.created_at,
        )


class QuotaPage(msgspec.Struct, frozen=True):
    """Some limits, oldest first; `next_cursor` is null on the last page."""

    data: list[QuotaView]
    next_cursor: str | None

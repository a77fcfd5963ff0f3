"""Last use, cost and quotas of keys, from usage and quotas. Requests write nothing for them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.schemas import KeyDetails
from moiety_platform.quota.kinds import LimitLevel
from moiety_platform.quota.models import Quota
from moiety_platform.tenants.models import ApiKey
from moiety_platform.usage.models import UsageRecord
from moiety_platform.usage.queries import UsageFilter, sum_usage
from moiety_wire.classes import SPECULATIVE_PREFILL


async def read_details(session: AsyncSession, keys: Sequence[ApiKey], now: datetime) -> dict[str, KeyDetails]:
    """Return the details of keys by id.

    Call it in a transaction with a stable snapshot (`take_snapshot_locks`), and with at most a page of keys.
    """
    if not keys:
        return {}
    key_ids = tuple(key.id for key in keys)
    last_used = await _last_uses(session, key_ids)
    since = month_start(now)
    wanted = UsageFilter(since, max(now, since) + timedelta(seconds=1), among=("key_id", key_ids))
    used = {one.group["key_id"]: one.totals for one in (await sum_usage(session, wanted, ("key",))).data}
    limits = await _limits(session, [key.root_id or key.id for key in keys])
    return {
        key.id: KeyDetails(
            last_used.get(key.id),
            used[key.id].requests if key.id in used else 0,
            used[key.id].cost_nanodollars if key.id in used else 0,
            limits.get(key.root_id or key.id, {}),
        )
        for key in keys
    }


def month_start(now: datetime) -> datetime:
    """Return the beginning of the month in UTC."""
    return now.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


async def _last_uses(session: AsyncSession, key_ids: Sequence[str]) -> dict[str, datetime]:
    """Return the start of each key's last request. The index of keys and times has it as its last entry."""
    last = (
        select(UsageRecord.started_at)
        .where(UsageRecord.key_id == ApiKey.id, UsageRecord.endpoint != SPECULATIVE_PREFILL)
        .order_by(UsageRecord.started_at.desc())
        .limit(1)
        .scalar_subquery()
    )
    found = await session.execute(select(ApiKey.id, last).where(ApiKey.id.in_(key_ids)))
    return {key_id: used_at for key_id, used_at in found if used_at is not None}


async def _limits(session: AsyncSession, root_ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the caps of keys by kind; a rotated key has those of the first key."""
    columns = Quota.scope_id, Quota.kind, Quota.cap
    wanted = select(*columns).where(Quota.level == LimitLevel.KEY, Quota.scope_id.in_(root_ids)).order_by(*columns)
    found: dict[str, dict[str, int]] = {}
    for scope_id, kind, cap in await session.execute(wanted):
        found.setdefault(scope_id, {})[kind] = cap
    return found

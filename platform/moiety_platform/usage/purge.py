"""Deletion of old request rows in small batches, within the caller's transaction, if the operator enables it.

Their sums are added to `usage_cuts` by hour and tenant in the same transaction, so that the remaining requests and the
cuts together always equal the ledger and the sums of hours.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime
from operator import add

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.dialect import insert_into
from moiety_platform.usage.models import UsageCut, UsageRecord
from moiety_wire.classes import SPECULATIVE_PREFILL

ROWS_AT_ONCE = 500
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost_nanodollars", "credit_nanodollars")


async def purge_requests(session: AsyncSession, before: datetime) -> int:
    """Delete some requests that started before `before`, the oldest first; return their number."""
    old = select(UsageRecord).where(UsageRecord.started_at < before)
    oldest = old.order_by(UsageRecord.started_at, UsageRecord.request_id).limit(ROWS_AT_ONCE)
    rows = (await session.scalars(oldest.with_for_update(skip_locked=True))).all()
    if not rows:
        return 0
    cuts: defaultdict[tuple[datetime, str], tuple[int, ...]] = defaultdict(lambda: (0,) * len(_SUMS))
    for row in rows:
        key = row.started_at.replace(minute=0, second=0, microsecond=0), row.tenant_id
        cuts[key] = tuple(
            map(add, cuts[key], (row.endpoint != SPECULATIVE_PREFILL, *(getattr(row, name) for name in _SUMS[1:])))
        )
    values = [
        {"hour": hour, "tenant_id": tenant_id, **dict(zip(_SUMS, sums, strict=True))}
        for (hour, tenant_id), sums in sorted(cuts.items())
    ]
    statement = insert_into(session, UsageCut)
    raised = {name: getattr(UsageCut, name) + statement.excluded[name] for name in _SUMS}
    keys = [UsageCut.hour, UsageCut.tenant_id]
    connection = await session.connection()
    await connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=raised), values)
    await session.execute(delete(UsageRecord).where(UsageRecord.request_id.in_([row.request_id for row in rows])))
    return len(rows)

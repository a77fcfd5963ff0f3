"""Rate buckets in the database, within the caller's transaction.

All replicas draw from one bucket by the database's clock, so their number does not multiply a limit. An amount that a
replica has drawn and loses is missing only briefly, since the bucket refills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.bulk import BulkInsert, BulkStatement
from moiety_platform.db.now import now_ms
from moiety_platform.quota.bucket import Bucket
from moiety_platform.quota.lease import WindowId
from moiety_platform.quota.models import Quota, QuotaRate
from moiety_platform.quota.store import Grant, LeaseRequest, Slice

REPLICAS_TO_THINK_OF = 2  # assumed number: a bucket does not know how many replicas draw from it


def _replacing(insert: Any) -> Any:
    state = {name: insert.excluded[name] for name in ("debt", "at_ms")}
    return insert.on_conflict_do_update(index_elements=["quota_id"], set_=state)


_begin = BulkInsert(QuotaRate, lambda insert: insert.on_conflict_do_nothing())
_replace = BulkInsert(QuotaRate, _replacing)


class RateStore:
    """Store of the rate buckets; it caches nothing."""

    def __init__(self, *, now: Callable[[], ColumnElement[int]] = now_ms) -> None:
        self._locked = BulkStatement(
            [QuotaRate.quota_id],
            lambda given, _: (
                select(QuotaRate.quota_id, Quota.cap, QuotaRate.debt, QuotaRate.at_ms, now())
                # rates whose limit was deleted are locked in order, too
                .outerjoin(Quota, Quota.id == QuotaRate.quota_id)
                .where(QuotaRate.quota_id.in_(given))
                .order_by(QuotaRate.quota_id)
                .with_for_update(of=QuotaRate)
            ),
        )

    async def exchange(
        self, session: AsyncSession, returned: Mapping[WindowId, int], wants: Sequence[LeaseRequest], slice_size: Slice
    ) -> dict[WindowId, Grant]:
        """Put back unused amounts, and draw what the rates allow.

        Windows of deleted limits are missing in the result.
        """
        asked = {want.window: want for want in wants}
        windows = sorted({*returned, *asked})
        if not windows:
            return {}
        buckets = await self._lock(session, windows)
        grants: dict[WindowId, Grant] = {}
        for window in windows:
            bucket = buckets.get(window)
            if bucket is None:
                continue
            bucket = bucket.take(-returned.get(window, 0))
            want = asked.get(window)
            if want is not None:
                amount = 0
                if want.least <= bucket.remaining:
                    wanted = slice_size(want.lacking, want.ahead, bucket.remaining, REPLICAS_TO_THINK_OF)
                    amount = min(bucket.remaining, wanted)
                bucket = bucket.take(amount)
                grants[window] = Grant(amount, bucket.remaining)
            buckets[window] = bucket
        await self._write(session, buckets)
        return grants

    async def _lock(self, session: AsyncSession, windows: Sequence[WindowId]) -> dict[WindowId, Bucket]:
        """Return the current buckets, locked until the end of the transaction."""
        await _begin(session, [(window.quota_id, 0, 0) for window in windows])
        by_id = {window.quota_id: window for window in windows}
        rows = await self._locked.read(session, [(window.quota_id,) for window in windows])
        return {
            by_id[quota_id]: Bucket(cap, debt, at_ms).at(moment)
            for quota_id, cap, debt, at_ms, moment in rows
            if cap is not None
        }

    async def _write(self, session: AsyncSession, buckets: Mapping[WindowId, Bucket]) -> None:
        await _replace(session, [(w.quota_id, bucket.debt, bucket.at_ms) for w, bucket in sorted(buckets.items())])

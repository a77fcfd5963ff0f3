"""Leases in the database, within the caller's transaction.

Windows are locked before leases, both in order, so that replicas do not deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, delete, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.now import now_ms
from moiety_platform.quota.kinds import ALWAYS
from moiety_platform.quota.lease import Charge, WindowId
from moiety_platform.quota.models import LeaseState, Quota, QuotaLease, QuotaWindow
from moiety_platform.quota.statements import (
    LeaseStatements,
    grant_leases,
    grant_windows,
    leases_of_all,
    open_windows,
    settle_leases,
    settle_windows,
    windows_alone,
)


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Request of a replica for one window: `lacking` in total, for several requests; `least` for one of them."""

    window: WindowId
    least: int
    lacking: int
    ahead: int  # desired amount beyond that


@dataclass(frozen=True, slots=True)
class Grant:
    """Grant to a replica; `remaining` is left for all replicas. An amount of 0 is a refusal."""

    amount: int
    remaining: int


@dataclass(frozen=True, slots=True)
class LeaseAmounts:
    """A lease as stored; `settled` includes only what has been booked."""

    granted: int = 0
    settled: int = 0


@dataclass(frozen=True, slots=True)
class AbandonedLeases:
    """Leases that a dead replica has left: the minimum time since its last renewal, and their number."""

    silent_s: float
    num_leases: int


WINDOWS_AT_ONCE = 1_000

WindowKey = tuple[str, datetime]
LeaseKey = tuple[str, datetime, str]
Slice = Callable[[int, int, int, int], int]  # (lacking, ahead, remaining, replicas) → amount to take


class LeaseStore:
    """Leases of one replica. Its id must never have been used before."""

    def __init__(self, replica_id: str, ttl_s: float, *, now: Callable[[], ColumnElement[int]] = now_ms) -> None:
        self.replica_id = replica_id
        self._ttl_ms = round(ttl_s * 1000)
        self.now = now
        self._statements = LeaseStatements(replica_id, lambda: now() + self._ttl_ms)

    async def exchange(
        self, session: AsyncSession, returned: Mapping[WindowId, int], wants: Iterable[LeaseRequest], slice_size: Slice
    ) -> tuple[dict[WindowId, Grant], dict[WindowId, LeaseAmounts]]:
        """Take back what is neither settled nor held, and grant what the caps allow.

        Returns the grants, without windows of deleted limits, and the leases that were raised, which are thereby
        renewed.
        """
        asked = {want.window: want for want in wants}
        windows = sorted({*returned, *asked})
        if not windows:
            return {}, {}
        await open_windows(session, [(*_key(window), 0, 0) for window in windows])
        state = await self._lock(session, windows)
        returned = await self._still_ours(session, returned)
        grants: dict[WindowId, Grant] = {}
        for window, want in asked.items():
            if window not in state:
                continue
            remaining, num_replicas = state[window]
            amount = 0
            if want.least <= remaining:
                amount = min(remaining, slice_size(want.lacking, want.ahead, remaining, num_replicas))
            grants[window] = Grant(amount, remaining - amount)
        changes = {window: -amount for window, amount in returned.items()}
        for window, grant in grants.items():
            changes[window] = changes.get(window, 0) + grant.amount
        return grants, await self._change(session, changes)

    async def renew(self, session: AsyncSession, windows: Iterable[WindowId]) -> dict[WindowId, LeaseAmounts]:
        """Extend the leases on these windows; return the stored state of each."""
        found: dict[WindowId, LeaseAmounts] = {}
        for some in _in_order(windows):
            found |= await self._renew(session, some)
        return found

    async def _renew(self, session: AsyncSession, windows: Sequence[WindowId]) -> dict[WindowId, LeaseAmounts]:
        keys = list(map(_key, windows))
        await self._statements.mine_alone.lock(session, keys)  # in the order of bookings
        await self._statements.renew.execute(session, keys)
        rows = await self._statements.mine.read(session, keys)
        return {WindowId(quota_id, start): LeaseAmounts(granted, settled) for quota_id, start, granted, settled in rows}

    async def quarantine_expired(self, session: AsyncSession) -> int:
        """Quarantine the stock leases of replicas that did not renew in time; their rest stays charged.

        Returns the number of leases. Call it in a transaction of its own; leases that others have locked are skipped.
        """
        keys = (QuotaLease.quota_id, QuotaLease.start, QuotaLease.replica_id)
        expired = (
            QuotaLease.state == LeaseState.LIVE,
            QuotaLease.expires_ms < self.now(),
            QuotaLease.start != ALWAYS,
        )
        statement = (
            update(QuotaLease)
            .where(tuple_(*keys).in_(select(*keys).where(*expired).with_for_update(skip_locked=True)))
            .values(state=LeaseState.QUARANTINED)
            .returning(QuotaLease.quota_id)
        )
        return len((await session.execute(statement)).all())

    async def quarantined(self, session: AsyncSession) -> dict[str, AbandonedLeases]:
        """Return the replicas that have quarantined leases with something left."""
        silent_ms = self.now() - (func.max(QuotaLease.expires_ms) - self._ttl_ms)
        statement = (
            select(QuotaLease.replica_id, silent_ms, func.count())
            .where(QuotaLease.state == LeaseState.QUARANTINED, QuotaLease.granted > QuotaLease.settled)
            .group_by(QuotaLease.replica_id)
        )
        found = await session.execute(statement)
        return {replica_id: AbandonedLeases(ms / 1000, num_leases) for replica_id, ms, num_leases in found}

    async def release_quarantined(self, session: AsyncSession, replica_id: str) -> int:
        """Free what this replica's quarantined leases have left, after it was proven unspent.

        Returns the number of leases. Call it in a transaction of its own.
        """
        keys = (QuotaLease.quota_id, QuotaLease.start)
        theirs = (
            QuotaLease.replica_id == replica_id,
            QuotaLease.state == LeaseState.QUARANTINED,
            QuotaLease.granted > QuotaLease.settled,
        )
        windows = sorted(WindowId(*row) for row in await session.execute(select(*keys).where(*theirs)))
        await self._lock(session, windows)
        rows = await session.execute(
            select(*keys, QuotaLease.granted - QuotaLease.settled).where(*theirs).order_by(*keys).with_for_update()
        )
        left = {WindowId(quota_id, start): amount for quota_id, start, amount in rows}
        await grant_windows(session, {_key(window): -amount for window, amount in left.items()})
        await grant_leases(session, {(*_key(window), replica_id): -amount for window, amount in left.items()})
        return len(left)

    async def release_expired(self, session: AsyncSession) -> int:
        """Free the slots of replicas that did not renew in time: their requests have ended.

        Returns the number of leases. Call it in a transaction of its own.
        """
        expired = QuotaLease.start == ALWAYS, QuotaLease.expires_ms < self.now()
        affected = sorted(set(await session.scalars(select(QuotaLease.quota_id).where(*expired))))
        if not affected:
            return 0
        of_these = QuotaWindow.start == ALWAYS, QuotaWindow.quota_id.in_(affected)
        locked = select(QuotaWindow.quota_id).where(*of_these).order_by(QuotaWindow.quota_id).with_for_update()
        await session.execute(locked)
        leases = select(QuotaLease.quota_id).where(*expired, QuotaLease.quota_id.in_(affected))
        await session.execute(leases.order_by(QuotaLease.quota_id, QuotaLease.replica_id).with_for_update())
        ended = delete(QuotaLease).where(*expired, QuotaLease.quota_id.in_(affected))
        rows = (await session.execute(ended.returning(QuotaLease.quota_id, QuotaLease.granted))).all()
        freed: dict[WindowKey, int] = defaultdict(int)
        for quota_id, granted in rows:
            freed[quota_id, ALWAYS] -= granted
        await grant_windows(session, freed)
        return len(rows)

    async def _still_ours(self, session: AsyncSession, returned: Mapping[WindowId, int]) -> dict[WindowId, int]:
        """Limit the returned amounts to what the store still has for this replica.

        A sweep meanwhile has already given back the rest. The windows are locked.
        """
        stored: dict[WindowId, int] = {}
        for some in _in_order(returned):
            rows = await self._statements.mine.read(session, map(_key, some))
            stored |= {WindowId(quota_id, start): granted - settled for quota_id, start, granted, settled in rows}
        return {window: min(amount, stored.get(window, 0)) for window, amount in returned.items()}

    async def _lock(self, session: AsyncSession, windows: Sequence[WindowId]) -> dict[WindowId, tuple[int, int]]:
        """Return what remains of each window and how many replicas share it; lock the windows until the end."""
        found: dict[WindowId, tuple[int, int]] = {}
        for some in _in_order(windows):
            rows = await self._statements.windows.read(session, map(_key, some))
            found |= {
                WindowId(quota_id, start): (max(0, cap - granted), 1 + others)
                for quota_id, start, granted, cap, others in rows
                if cap is not None
            }
        return found

    async def _change(self, session: AsyncSession, amounts: Mapping[WindowId, int]) -> dict[WindowId, LeaseAmounts]:
        """Raise or lower the amounts granted to this replica; return the raised leases. The windows are locked."""
        lowered = {_key(window): amount for window, amount in amounts.items() if amount < 0}
        raised = {_key(window): amount for window, amount in sorted(amounts.items()) if amount > 0}
        await grant_windows(session, lowered | raised)
        await grant_leases(session, {(*key, self.replica_id): amount for key, amount in lowered.items()})
        if not raised:
            return {}
        changed = await self._statements.grant.execute(session, [(*key, amount) for key, amount in raised.items()])
        return {WindowId(one.quota_id, one.start): LeaseAmounts(one.granted, one.settled) for one in changed}


async def lease_covers(session: AsyncSession, charges: Iterable[Charge]) -> bool:
    """Return whether the leases still cover the charges, ignoring deleted limits.

    It is False only if leases were proven unspent and released.
    """
    for charge in charges:
        lease = await session.get(QuotaLease, (charge.window.quota_id, charge.window.start, charge.replica_id))
        if lease is None or lease.granted - lease.settled >= charge.amount:
            continue
        if await session.get(Quota, charge.window.quota_id) is not None:
            return False
    return True


async def book(session: AsyncSession, charges: Iterable[Charge]) -> None:
    """Add the use of requests to the settled amounts of their windows and leases.

    A late charge whose lease was released counts as granted, too, because the use is a fact. Charges on unknown leases
    are not booked.
    """
    amounts: dict[tuple[WindowId, str], int] = defaultdict(int)
    for charge in charges:
        amounts[charge.window, charge.replica_id] += charge.amount
    if not amounts:
        return
    left = await _lock_leases(session, {window for window, _ in amounts})
    settled: dict[WindowKey, int] = defaultdict(int)
    short: dict[WindowKey, int] = defaultdict(int)
    of_leases: dict[LeaseKey, int] = {}
    short_leases: dict[LeaseKey, int] = {}
    for (window, replica_id), amount in amounts.items():
        if (window, replica_id) not in left:
            continue
        settled[_key(window)] += amount
        of_leases[*_key(window), replica_id] = amount
        missing = amount - left[window, replica_id]
        if missing > 0:
            short[_key(window)] += missing
            short_leases[*_key(window), replica_id] = missing
    await grant_windows(session, short)
    await grant_leases(session, short_leases)
    await settle_windows(session, settled)
    await settle_leases(session, of_leases)


async def _lock_leases(session: AsyncSession, windows: Iterable[WindowId]) -> dict[tuple[WindowId, str], int]:
    """Return what each lease on these windows has left; lock windows and leases until the end."""
    found: dict[tuple[WindowId, str], int] = {}
    for some in _in_order(windows):
        keys = list(map(_key, some))
        await windows_alone.lock(session, keys)
        rows = await leases_of_all.read(session, keys)
        found |= {(WindowId(quota_id, start), replica_id): left for quota_id, start, replica_id, left in rows}
    return found


def _in_order(windows: Iterable[WindowId]) -> list[list[WindowId]]:
    """Split the windows into batches for one statement each, in locking order."""
    ordered = sorted(windows)
    return [ordered[first : first + WINDOWS_AT_ONCE] for first in range(0, len(ordered), WINDOWS_AT_ONCE)]


def _key(window: WindowId) -> WindowKey:
    return window.quota_id, window.start

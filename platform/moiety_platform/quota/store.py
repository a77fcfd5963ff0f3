"""Leases in the database, within the caller's transaction. Windows are locked before leases, both in order, so that
replicas wait for each other and never in a ring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, bindparam, func, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import Base
from moiety_platform.db.now import now_ms
from moiety_platform.quota.lease import Charge, WindowId
from moiety_platform.quota.models import LeaseState, Quota, QuotaLease, QuotaWindow


@dataclass(frozen=True, slots=True)
class Want:
    """What a replica asks for of one window: `lacking` in all, by several requests; `least` by one of them."""

    window: WindowId
    least: int
    lacking: int
    use_per_s: float


@dataclass(frozen=True, slots=True)
class Grant:
    """What it gets; `remaining` is what is left for all replicas. An amount of 0 is a refusal."""

    amount: int
    remaining: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A lease as the store has it: of what was settled, only what has been booked."""

    granted: int = 0
    settled: int = 0


Change = tuple[dict[str, Any], int]  # (the row's key, what is added)
Slice = Callable[[int, float, int, int], int]  # (lacking, use a second, remaining, replicas) → how much to take


class LeaseStore:
    """The leases of one replica. Its id must never have been used before."""

    def __init__(self, replica_id: str, ttl_s: float, *, now: Callable[[], ColumnElement[int]] = now_ms) -> None:
        self.replica_id = replica_id
        self._ttl_ms = round(ttl_s * 1000)
        self._now = now

    async def renew(self, session: AsyncSession) -> dict[WindowId, Stored]:
        """Put off the expiry of all leases; what the store has of each. One that is not among them was closed."""
        statement = (
            update(QuotaLease)
            .where(QuotaLease.replica_id == self.replica_id, QuotaLease.state != LeaseState.CLOSED)
            .values(expires_ms=self._now() + self._ttl_ms, state=LeaseState.LIVE)
            .returning(QuotaLease.quota_id, QuotaLease.start, QuotaLease.granted, QuotaLease.settled)
        )
        rows = await session.execute(statement)
        return {WindowId(quota_id, start): Stored(granted, settled) for quota_id, start, granted, settled in rows}

    async def grow(self, session: AsyncSession, wants: Iterable[Want], slice_size: Slice) -> dict[WindowId, Grant]:
        """Grant what the caps allow. A window whose limit is gone is missing from the answer."""
        ordered = sorted(wants, key=lambda want: want.window)
        if not ordered:
            return {}
        windows = [want.window for want in ordered]
        connection = await session.connection()
        await connection.execute(
            _insert(session, QuotaWindow).on_conflict_do_nothing(),
            [{"quota_id": w.quota_id, "start": w.start, "granted": 0, "settled": 0} for w in windows],
        )
        state = await self._lock(session, windows)
        grants: dict[WindowId, Grant] = {}
        for want in ordered:
            if want.window not in state:
                continue
            remaining, num_replicas = state[want.window]
            amount = 0
            if want.least <= remaining:
                amount = min(remaining, slice_size(want.lacking, want.use_per_s, remaining, num_replicas))
            grants[want.window] = Grant(amount, remaining - amount)
        await self._grant(session, {window: grant.amount for window, grant in grants.items() if grant.amount})
        return grants

    async def give_back(self, session: AsyncSession, amounts: Mapping[WindowId, int]) -> None:
        """Return what is neither spent nor held."""
        taken = {window: -amount for window, amount in amounts.items() if amount > 0}
        await _add(session, QuotaWindow, "granted", _by_window(taken))
        await _add(session, QuotaLease, "granted", self._by_lease(taken))

    async def quarantine_expired(self, session: AsyncSession) -> int:
        """Whose replica has not renewed in time: the rest stays charged. The number of leases."""
        statement = (
            update(QuotaLease)
            .where(QuotaLease.state == LeaseState.LIVE, QuotaLease.expires_ms < self._now())
            .values(state=LeaseState.QUARANTINED)
            .returning(QuotaLease.quota_id)
        )
        return len((await session.execute(statement)).all())

    async def _lock(self, session: AsyncSession, windows: list[WindowId]) -> dict[WindowId, tuple[int, int]]:
        """What remains of each window, and how many replicas share it; nobody changes them until the end."""
        sharing = (
            select(func.count())
            .where(
                QuotaLease.quota_id == QuotaWindow.quota_id,
                QuotaLease.start == QuotaWindow.start,
                QuotaLease.state == LeaseState.LIVE,
                QuotaLease.replica_id != self.replica_id,
            )
            .scalar_subquery()
        )
        statement = (
            select(QuotaWindow.quota_id, QuotaWindow.start, QuotaWindow.granted, Quota.cap, sharing)
            .join(Quota, Quota.id == QuotaWindow.quota_id)
            .where(tuple_(QuotaWindow.quota_id, QuotaWindow.start).in_([(w.quota_id, w.start) for w in windows]))
            .order_by(QuotaWindow.quota_id, QuotaWindow.start)
            .with_for_update(of=QuotaWindow)
        )
        rows = await session.execute(statement)
        return {
            WindowId(quota_id, start): (max(0, cap - granted), 1 + others)
            for quota_id, start, granted, cap, others in rows
        }

    async def _grant(self, session: AsyncSession, amounts: Mapping[WindowId, int]) -> None:
        if not amounts:
            return
        await _add(session, QuotaWindow, "granted", _by_window(amounts))
        leases = _insert(session, QuotaLease).values(expires_ms=self._now() + self._ttl_ms, state=LeaseState.LIVE)
        leases = leases.on_conflict_do_update(
            index_elements=[QuotaLease.quota_id, QuotaLease.start, QuotaLease.replica_id],
            set_={"granted": QuotaLease.granted + leases.excluded.granted},
        )
        connection = await session.connection()
        await connection.execute(
            leases, [{**key, "granted": amount, "settled": 0} for key, amount in self._by_lease(amounts)]
        )

    def _by_lease(self, amounts: Mapping[WindowId, int]) -> list[Change]:
        return [({**key, "replica_id": self.replica_id}, amount) for key, amount in _by_window(amounts)]


async def book(session: AsyncSession, charges: Iterable[Charge]) -> None:
    """Add what requests have used to what their windows and leases have settled."""
    of_windows: dict[WindowId, int] = defaultdict(int)
    of_leases: dict[tuple[WindowId, str], int] = defaultdict(int)
    for charge in charges:
        of_windows[charge.window] += charge.amount
        of_leases[charge.window, charge.replica_id] += charge.amount
    await _add(session, QuotaWindow, "settled", _by_window(of_windows))
    keyed = sorted(of_leases.items())
    leases = [({"quota_id": w.quota_id, "start": w.start, "replica_id": by}, amount) for (w, by), amount in keyed]
    await _add(session, QuotaLease, "settled", leases)


async def _add(session: AsyncSession, table: type[Base], column: str, changes: Sequence[Change]) -> None:
    """Add to a column of the rows with these keys, by one statement prepared once."""
    if not changes:
        return
    columns = table.__table__.c
    keys = [columns[name] == bindparam(f"key_{name}") for name in changes[0][0]]
    connection = await session.connection()
    await connection.execute(
        update(table.__table__).where(*keys).values({column: columns[column] + bindparam("amount")}),  # type: ignore[arg-type]
        [{f"key_{name}": value for name, value in key.items()} | {"amount": amount} for key, amount in changes],
    )


def _by_window(amounts: Mapping[WindowId, int]) -> list[Change]:
    return [
        ({"quota_id": window.quota_id, "start": window.start}, amount) for window, amount in sorted(amounts.items())
    ]


def _insert(session: AsyncSession, table: Any) -> Any:
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    return dialect.insert(table)

"""Invariants of quota leases under any sequence of requests, crashes, outages and clock changes.

Nothing is spent beyond what was granted, nothing is granted beyond the cap, nothing is booked twice, and nothing stays
reserved."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from tests.conftest import EXAMPLES
from tests.database_clock import DatabaseClock

from moiety_platform.clock import ManualClock
from moiety_platform.db.base import Base
from moiety_platform.db.session import Database
from moiety_platform.errors import RequestExceedsQuota, Unavailable
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.errors import QuotaExceeded
from moiety_platform.quota.kinds import LimitKind, LimitLevel, Scope, Unit
from moiety_platform.quota.lease import Charge, Hold
from moiety_platform.quota.models import LeaseState, Quota, QuotaLease, QuotaWindow
from moiety_platform.quota.store import LeaseStore, book

START = datetime(2026, 1, 1, 23, 0, tzinfo=UTC)
TTL_S = 20.0
SCOPES = (Scope(LimitLevel.TENANT, "tenant"), Scope(LimitLevel.PROJECT, "project"), Scope(LimitLevel.KEY, "key"))
CAPS = {SCOPES[0]: 400, SCOPES[1]: 300, SCOPES[2]: 150}


class Store(Database):
    """A database that can be away."""

    away = False

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        self._check()
        async with super().read() as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        self._check()
        async with super().write() as session:
            yield session

    def _check(self) -> None:
        if self.away:
            raise Unavailable("the database is away")


@functools.cache
def new_store() -> bytes:
    """The file that each example begins with."""

    async def make(path: Path) -> None:
        store = Store.open(f"sqlite:///{path}")
        async with store.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        async with store.write() as session:
            for scope, cap in CAPS.items():
                quota = Quota(id=scope.id, level=scope.level, scope_id=scope.id, kind=LimitKind.TOKENS_PER_DAY, cap=cap)
                quota.created_at = START
                session.add(quota)
        await store.close()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quota.db"
        asyncio.run(make(path))
        return path.read_bytes()


class Replica:
    """A gateway process: its enforcer, its open requests, and charges that it has not booked yet. Its clock may run
    faster or slower than the others'."""

    def __init__(self, number: int, store: Store, world: World, pace: float) -> None:
        self.clock, self.pace = ManualClock(START), pace
        self.leases = LeaseStore(f"replica-{number}", TTL_S, now=world.database_clock.now)
        self.enforcer = QuotaEnforcer(store, self.leases, self.clock, ttl_s=TTL_S)
        self.open: list[tuple[Hold, int]] = []
        self.unbooked: list[tuple[Charge, ...]] = []
        self.is_alive = True

    async def ask(self, request: Coroutine[Any, Any, Any]) -> Any:
        """Carry out a request's coroutine, and the rounds with the database that it waits for."""
        task = asyncio.ensure_future(request)
        async with asyncio.timeout(60):
            while not task.done():
                if self.enforcer.stats().waiting:
                    with contextlib.suppress(Unavailable):
                        await self.enforcer.transact()
                await asyncio.wait({task}, timeout=0.001)
        return await task


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "quota.db"
        path.write_bytes(new_store())
        self.store = Store.open(f"sqlite:///{path}")
        self.database_clock = DatabaseClock()
        self.replicas: list[Replica] = []
        self.caps = dict(CAPS)
        self.highest_cap = dict(CAPS)
        self.lowest_cap = dict(CAPS)
        self.granted: dict[tuple[str, datetime], int] = {}
        self.crashed: set[str] = set()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize(usage_rates=st.lists(st.sampled_from([0.9, 1.0, 1.1]), min_size=1, max_size=3))
    def begin(self, usage_rates: list[float]) -> None:
        for pace in usage_rates:
            self.start(pace)

    def start(self, pace: float) -> None:
        self.replicas.append(Replica(len(self.replicas), self.store, self, pace))

    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_alive]

    def busy(self) -> list[Replica]:
        return [replica for replica in self.alive() if replica.open]

    # ── requests ──

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), tokens=st.integers(1, 120), scopes=st.sampled_from([SCOPES, SCOPES[:2], SCOPES[:1]]))
    def request(self, data: st.DataObject, tokens: int, scopes: tuple[Scope, ...]) -> None:
        replica = data.draw(st.sampled_from(self.alive()))
        try:
            hold = self.run(replica.ask(replica.enforcer.hold(scopes, {Unit.TOKENS: tokens})))
        except RequestExceedsQuota:
            assert any(self.lowest_cap.get(scope, tokens) < tokens for scope in scopes), "it fits every limit there was"
            return
        except (QuotaExceeded, Unavailable):
            return
        replica.open.append((hold, tokens))

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), more=st.integers(1, 60))
    def extend(self, data: st.DataObject, more: int) -> None:
        replica = data.draw(st.sampled_from(self.busy()))
        number = data.draw(st.integers(0, len(replica.open) - 1))
        hold, tokens = replica.open[number]
        try:
            refused = self.run(replica.ask(replica.enforcer.extend(hold, {Unit.TOKENS: tokens + more})))
        except Unavailable:
            return
        if refused is None:
            replica.open[number] = hold, tokens + more

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), part=st.floats(0, 1))
    def end(self, data: st.DataObject, part: float) -> None:
        replica = data.draw(st.sampled_from(self.busy()))
        hold, tokens = replica.open.pop(data.draw(st.integers(0, len(replica.open) - 1)))
        replica.unbooked.append(hold.settle({Unit.TOKENS: round(part * tokens)}))

    # ── the processes and the world ──

    @precondition(lambda self: not self.store.away)
    @rule(data=st.data())
    def book_some(self, data: st.DataObject) -> None:
        """What a dead process left behind is booked by its successor."""
        replica = data.draw(st.sampled_from(self.replicas))
        self.run(self._book(replica))

    async def _book(self, replica: Replica) -> None:
        async with self.store.write() as session:
            await book(session, [charge for charges in replica.unbooked for charge in charges])
        replica.unbooked.clear()

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def tick(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(self.alive()))
        try:
            self.run(replica.enforcer.transact())
            self.run(self._quarantine(replica))
        except Unavailable:
            assert self.store.away

    async def _quarantine(self, replica: Replica) -> None:
        async with self.store.write() as session:
            await replica.leases.quarantine_expired(session)

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.database_clock.advance(seconds)
        for replica in self.replicas:
            replica.clock.advance(seconds * replica.pace)

    @rule()
    def outage(self) -> None:
        self.store.away = not self.store.away

    @precondition(lambda self: len(self.replicas) < 5 and self.alive())
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.alive()))
        victim.is_alive = False
        victim.open.clear()
        self.crashed.add(victim.enforcer.replica_id)
        self.start(victim.pace)

    @precondition(lambda self: not self.store.away)
    @rule(scope=st.sampled_from(SCOPES), cap=st.integers(0, 500))
    def set_cap(self, scope: Scope, cap: int) -> None:
        self.caps[scope] = cap
        self.highest_cap[scope] = max(cap, self.highest_cap[scope])
        self.lowest_cap[scope] = min(cap, self.lowest_cap[scope])
        self.run(self._set_cap(scope, cap))

    async def _set_cap(self, scope: Scope, cap: int) -> None:
        async with self.store.write() as session:
            quota = await session.get_one(Quota, scope.id)
            quota.cap = cap

    # ── the laws ──

    @invariant()
    def hold(self) -> None:
        windows, leases = self.run(self._read())
        for key, window in windows.items():
            own = [lease for lease in leases if (lease.quota_id, lease.start) == key]
            assert window.granted == sum(lease.granted for lease in own)
            assert window.settled == sum(lease.settled for lease in own)
            cap = next(cap for scope, cap in self.caps.items() if scope.id == key[0])
            assert window.granted <= max(cap, self.granted.get(key, 0)), "more was granted than the cap allows"
            self.granted[key] = window.granted
        stored = {(lease.replica_id, lease.quota_id, lease.start): lease for lease in leases}
        for replica in self.replicas:
            for window_id, account in replica.enforcer._accounts.items():
                lease = account.lease
                there = stored.get((replica.enforcer.replica_id, window_id.quota_id, window_id.start))
                spent = lease.settled + lease.held
                assert spent <= (there.granted if there else 0), "a replica has spent what it was not given"

    async def _read(self) -> tuple[dict[tuple[str, datetime], QuotaWindow], list[QuotaLease]]:
        async with Database.read(self.store) as session:
            windows = {(window.quota_id, window.start): window for window in await session.scalars(select(QuotaWindow))}
            return windows, list(await session.scalars(select(QuotaLease)))

    def teardown(self) -> None:
        self.store.away = False
        self.run(self._end())
        self.loop.close()
        self.folder.cleanup()

    async def _end(self) -> None:
        for replica in self.replicas:
            for hold, tokens in replica.open:
                replica.unbooked.append(hold.settle({Unit.TOKENS: tokens}))
            await self._book(replica)
            if replica.is_alive:
                await replica.enforcer.transact()
                await replica.enforcer.transact(give_back=lambda account: account.lease.free)
        _, leases = await self._read()
        for lease in leases:
            if lease.replica_id not in self.crashed:
                assert lease.granted == lease.settled, "something stays reserved"
            assert lease.state in (LeaseState.LIVE, LeaseState.QUARANTINED)
        await self.store.close()


def test_the_laws_hold_whatever_happens() -> None:
    run_state_machine_as_test(
        World,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )

"""Leases on a real store: replicas that take at once get no more than the cap together, and lose nothing of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from tests.database_clock import DatabaseClock

from moiety_platform.clock import SystemClock
from moiety_platform.db.failures import RETRY_AFTER_S
from moiety_platform.db.session import Database
from moiety_platform.errors import RequestExceedsQuota, Unavailable
from moiety_platform.quota.account import Account
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.errors import QuotaExceeded
from moiety_platform.quota.kinds import (
    Limit,
    LimitKind,
    LimitLevel,
    Meter,
    Period,
    Scope,
    Unit,
    window_end,
    window_start,
)
from moiety_platform.quota.lease import Charge, Hold, Lease, WindowId
from moiety_platform.quota.lease_views import list_leases
from moiety_platform.quota.models import LeaseState, Quota, QuotaLease, QuotaWindow
from moiety_platform.quota.schemas import NewQuota
from moiety_platform.quota.service import set_quota
from moiety_platform.quota.slices import ahead_of_peak, ahead_of_use, slice_size, surplus
from moiety_platform.quota.store import LeaseRequest, LeaseStore, book
from moiety_platform.usage.recorder import UsageRecorder
from moiety_platform.usage.row import UsageRow

from .conftest import CuttableStore, hold_without_rounds


class FrozenClock(SystemClock):
    """A clock on which no time passes."""

    def monotonic(self) -> float:
        return 100.0


TENANTS = [Scope(LimitLevel.TENANT, f"tenant-{number}") for number in range(6)]
WHOLE = Scope(LimitLevel.PROJECT, "whole")
SMALL_CAP, WHOLE_CAP = 1_000, 4_000


def row(number: int, charges: tuple[Charge, ...]) -> UsageRow:
    return UsageRow(
        f"request-{number}", "t", "p", "k", "/v1", "m", "standard", datetime(2026, 1, 1, tzinfo=UTC), "stop", 200, 1,
        0, 0, 0, None, None, 1.0, charges=charges,
    )  # fmt: skip


async def set_caps(database: Database, caps: dict[Scope, int]) -> None:
    async with database.write() as session:
        for scope, cap in caps.items():
            quota = Quota(id=scope.id, level=scope.level, scope_id=scope.id, kind=LimitKind.TOKENS_PER_DAY, cap=cap)
            quota.created_at = datetime.now(UTC)
            session.add(quota)


async def windows(database: Database) -> dict[str, QuotaWindow]:
    async with database.read() as session:
        return {window.quota_id: window for window in await session.scalars(select(QuotaWindow))}


async def test_replicas_that_take_at_once_stay_within_the_caps_and_use_them_up(
    database: Database, tmp_path: Path
) -> None:
    await set_caps(database, {**dict.fromkeys(TENANTS, SMALL_CAP), WHOLE: WHOLE_CAP})
    enforcers = [
        QuotaEnforcer(database, LeaseStore(f"r-{n}", 20.0), SystemClock(), tick_s=0.2, answer_s=30.0) for n in range(3)
    ]
    recorder = UsageRecorder(database, tmp_path / "journal")
    await recorder.start()
    for enforcer in enforcers:
        await enforcer.start()
    rng = random.Random(0)
    used: dict[str, int] = {scope.id: 0 for scope in (*TENANTS, WHOLE)}
    numbers = iter(range(100_000))

    async def client(scope: Scope) -> None:
        refused = 0
        while refused < 4:
            tokens = rng.randint(1, 20)
            try:
                hold = await rng.choice(enforcers).hold([scope, WHOLE], {Unit.TOKENS: tokens})
            except QuotaExceeded:
                refused += 1
                continue
            await asyncio.sleep(rng.random() * 0.01)
            spent = rng.randint(0, tokens)
            recorder.record(row(next(numbers), hold.settle({Unit.TOKENS: spent})))
            used[scope.id] += spent
            used[WHOLE.id] += spent

    await asyncio.gather(*(client(scope) for scope in TENANTS for _ in range(4)))
    for scope in TENANTS:  # what requests returned that were running when the last ones were refused
        await client(scope)
    for enforcer in enforcers:
        await enforcer.stop()
    await recorder.stop()
    found = await windows(database)
    for scope in (*TENANTS, WHOLE):
        window = found[scope.id]
        assert window.settled == window.granted == used[scope.id] <= (WHOLE_CAP if scope is WHOLE else SMALL_CAP)
    assert used[WHOLE.id] >= 0.98 * WHOLE_CAP


async def test_a_row_is_charged_once_however_often_it_is_stored(database: Database, tmp_path: Path) -> None:
    await set_caps(database, {WHOLE: 100})
    enforcer = QuotaEnforcer(database, LeaseStore("r", 20.0), SystemClock(), tick_s=0.05)
    await enforcer.start()
    hold = await enforcer.hold([WHOLE], {Unit.TOKENS: 30})
    charged = row(1, hold.settle({Unit.TOKENS: 25}))
    for folder in ("a", "b"):
        recorder = UsageRecorder(database, tmp_path / folder)
        await recorder.start()
        recorder.record(charged)
        recorder.record(charged)
        await recorder.stop()
    await enforcer.stop()
    assert (await windows(database))[WHOLE.id].settled == 25


async def test_a_request_whose_gateway_is_killed_is_charged_its_prompt_by_the_next(
    database: Database, tmp_path: Path
) -> None:
    await set_caps(database, {WHOLE: 100})
    enforcer = QuotaEnforcer(database, LeaseStore("killed", 20.0), SystemClock(), tick_s=60.0)
    await enforcer.start()
    hold = await enforcer.hold([WHOLE], {Unit.TOKENS: 30})
    killed = UsageRecorder(database, tmp_path)
    killed.opened(row(1, hold.charges({Unit.TOKENS: 12})))
    await asyncio.sleep(0)  # the turn in which it came ends
    killed._live_log.close(keep=True)
    descriptor = killed._live_log._descriptor
    os.close(descriptor)  # as the end of a process does
    successor = UsageRecorder(database, tmp_path)
    await successor.start()
    await successor.stop()
    window = (await windows(database))[WHOLE.id]
    assert (window.settled, window.granted) == (12, 30), "what is not known to be spent stays charged"


async def test_an_expired_lease_is_quarantined_and_can_be_resumed(database: Database, time: DatabaseClock) -> None:
    await set_caps(database, {WHOLE: 100})
    stores = [LeaseStore(name, 20.0, now=time.now) for name in ("lost", "other")]
    lost, other = (QuotaEnforcer(database, store, SystemClock(), ttl_s=20.0) for store in stores)
    for enforcer in (lost, other):
        await hold_without_rounds(enforcer, WHOLE, {Unit.TOKENS: 30})
    time.advance(21.0)
    async with database.write() as session:
        assert await stores[1].quarantine_expired(session) == 2
    async with database.read() as session:
        states = {lease.replica_id: lease.state for lease in await session.scalars(select(QuotaLease))}
    assert states["lost"] == LeaseState.QUARANTINED
    assert (await windows(database))[WHOLE.id].granted == 60
    await lost.transact()
    async with database.read() as session:
        lease = (await session.scalars(select(QuotaLease).where(QuotaLease.replica_id == "lost"))).one()
    assert (lease.state, lease.granted) == (LeaseState.LIVE, 30)


async def test_administrators_see_who_holds_what_and_what_is_quarantined(
    database: Database, time: DatabaseClock
) -> None:
    await set_caps(database, {WHOLE: 100})
    stores = [LeaseStore(name, 20.0, now=time.now) for name in ("lost", "here")]
    for enforcer in (QuotaEnforcer(database, store, SystemClock(), ttl_s=20.0) for store in stores):
        await hold_without_rounds(enforcer, WHOLE, {Unit.TOKENS: 30})
    time.advance(21.0)
    async with database.write() as session:
        await stores[1].quarantine_expired(session)
    async with database.write() as session:
        await stores[1].renew(session, [WindowId(WHOLE.id, window_start(Period.DAY, datetime.now(UTC)))])
    async with database.read() as session:
        live = await list_leases(session, LeaseState.LIVE, 10)
        quarantined = await list_leases(session, LeaseState.QUARANTINED, 10)
    (held,), (lost,) = live.data, quarantined.data
    assert (held.replica_id, held.state, held.granted, held.left, held.cap) == ("here", "live", 30, 30, 100)
    assert (lost.replica_id, lost.state, lost.left) == ("lost", "quarantined", 30)
    assert not live.truncated


async def change(database: Database, scope: Scope, cap: int | None) -> None:
    async with database.write() as session:
        quota = await session.get_one(Quota, scope.id)
        if cap is None:
            await session.delete(quota)
        else:
            quota.cap = cap


async def test_a_lowered_cap_takes_back_what_was_leased_though_requests_go_on(database: Database) -> None:
    await set_caps(database, {WHOLE: 1_000})
    enforcer = QuotaEnforcer(database, LeaseStore("r", 20.0), SystemClock(), tick_s=0.05)
    await enforcer.start()
    (await enforcer.hold([WHOLE], {Unit.TOKENS: 600})).settle({Unit.TOKENS: 0})
    await change(database, WHOLE, 0)
    # the store may refuse first, before the enforcer has read the cap
    with pytest.raises((QuotaExceeded, RequestExceedsQuota)):
        async with asyncio.timeout(60):
            while True:
                (await enforcer.hold([WHOLE], {Unit.TOKENS: 1})).settle({Unit.TOKENS: 1})
                await asyncio.sleep(0.02)
    await enforcer.stop()
    assert (await windows(database))[WHOLE.id].granted < 300


async def test_a_raised_cap_counts_as_soon_as_it_is_read(database: Database) -> None:
    await set_caps(database, {WHOLE: 10})
    enforcer = QuotaEnforcer(database, LeaseStore("r", 20.0), FrozenClock(), tick_s=60.0)
    await enforcer.start()
    hold = await enforcer.hold([WHOLE], {Unit.TOKENS: 6})
    with pytest.raises(QuotaExceeded):  # from what the store has just reported
        await enforcer.hold([WHOLE], {Unit.TOKENS: 7})
    await change(database, WHOLE, 1_000)
    enforcer.forget(WHOLE)
    (await enforcer.hold([WHOLE], {Unit.TOKENS: 900})).settle({Unit.TOKENS: 0})
    hold.settle({Unit.TOKENS: 6})
    await enforcer.stop()


async def patiently(enforcer: QuotaEnforcer, scope: Scope, tokens: int) -> Hold:
    """Retry until the store answers in time."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(Unavailable):
                return await enforcer.hold([scope], {Unit.TOKENS: tokens})


async def test_a_store_that_does_not_answer_turns_away_only_what_the_leases_do_not_cover(
    cuttable: CuttableStore,
) -> None:
    large = TENANTS[0]
    await set_caps(cuttable.steady, {large: 10**6, WHOLE: 100})
    enforcer = QuotaEnforcer(cuttable.database, LeaseStore("r", 20.0), SystemClock(), tick_s=0.05, answer_s=0.3)
    await enforcer.start()
    holds = [await patiently(enforcer, scope, 30) for scope in (large, WHOLE)]
    cuttable.wire.stall()
    holds += [await enforcer.hold([large], {Unit.TOKENS: 30}) for _ in range(20)]
    for _ in range(3):
        with pytest.raises(Unavailable) as caught:
            await enforcer.hold([WHOLE], {Unit.TOKENS: 70})  # all that is left, of which a lease never takes the whole
        assert (caught.value.code, caught.value.retry_after_s) == ("store_unavailable", RETRY_AFTER_S)
    with pytest.raises(Unavailable):
        await enforcer.hold([TENANTS[1]], {Unit.TOKENS: 1})  # whether it has a limit is not known
    cuttable.wire.resume()
    holds.append(await patiently(enforcer, WHOLE, 70))
    for hold in holds:
        hold.settle({Unit.TOKENS: 0})
    await enforcer.stop()
    assert {window.granted for window in (await windows(cuttable.steady)).values()} == {0}


async def test_a_limit_that_is_taken_away_cuts_no_stream(database: Database) -> None:
    await set_caps(database, {WHOLE: 100})
    enforcer = QuotaEnforcer(database, LeaseStore("r", 20.0), SystemClock(), tick_s=0.05)
    await enforcer.start()
    hold = await enforcer.hold([WHOLE], {Unit.TOKENS: 100})
    refusal = await enforcer.extend(hold, {Unit.TOKENS: 101})
    assert refusal is not None
    assert refusal.available == 0
    await change(database, WHOLE, None)
    async with asyncio.timeout(60):
        while await enforcer.extend(hold, {Unit.TOKENS: 5_000}) is not None:  # noqa: ASYNC110 - the enforcer tells nobody
            await asyncio.sleep(0.1)
    assert hold.settle({Unit.TOKENS: 5_000}) == ()
    await enforcer.stop()


async def test_a_limit_that_only_a_later_release_knows_breaks_no_other(database: Database) -> None:
    await set_caps(database, {WHOLE: 100})
    async with database.write() as session:
        later = Quota(id="later", level=WHOLE.level, scope_id=WHOLE.id, kind="tokens_per_century", cap=1)
        later.created_at = datetime.now(UTC)
        session.add(later)
    enforcer = QuotaEnforcer(database, LeaseStore("r", 20.0), SystemClock(), tick_s=0.05)
    await enforcer.start()
    hold = await enforcer.hold([WHOLE], {Unit.TOKENS: 30})
    assert [charge.window.quota_id for charge in hold.settle({Unit.TOKENS: 25})] == [WHOLE.id]
    with pytest.raises(QuotaExceeded):
        await enforcer.hold([WHOLE], {Unit.TOKENS: 100})
    await enforcer.stop()


async def test_a_limit_set_by_several_at_once_is_one_limit(database: Database, demo: Any) -> None:
    async def set_to(cap: int) -> str:
        async with database.write() as session:
            new = NewQuota(LimitLevel.TENANT, demo.tenant_id, LimitKind.TOKENS_PER_DAY, cap)
            return (await set_quota(session, new, datetime.now(UTC))).id

    assert len(set(await asyncio.gather(*map(set_to, range(8))))) == 1


async def test_replicas_that_return_and_take_while_others_book_wait_for_each_other(database: Database) -> None:
    """The windows of a limit that is gone are locked in the same order as the others."""
    await set_caps(database, dict.fromkeys(TENANTS, 100_000))
    day = datetime(2026, 1, 1, tzinfo=UTC)
    ids = [WindowId(scope.id, day) for scope in TENANTS]
    stores = [LeaseStore(f"r-{number}", 20.0) for number in range(3)]
    for store in stores:
        async with database.write() as session:
            await store.exchange(session, {}, [LeaseRequest(window, 5_000, 5_000, 0) for window in ids], slice_size)
    await change(database, TENANTS[0], None)

    async def work(store: LeaseStore, number: int) -> None:
        rng = random.Random(number)
        for _ in range(25):
            async with database.write() as session:
                some = rng.sample(ids, 4)
                await store.exchange(session, {some[0]: 1}, [LeaseRequest(w, 1, 1, 0) for w in some[1:]], slice_size)
                await store.renew(session, ids)
            async with database.write() as session:
                await book(session, [Charge(window, store.replica_id, 1) for window in rng.sample(ids, 3)])
            async with database.write() as session:
                await store.quarantine_expired(session)

    await asyncio.gather(*(work(store, number) for number, store in enumerate(stores * 2)))
    state = (await windows(database)).values()
    assert sum(window.settled for window in state) == 6 * 25 * 3
    assert all(window.settled <= window.granted <= 100_000 for window in state)


@pytest.mark.parametrize(
    ("period", "now", "start", "end"),
    [
        (Period.DAY, "2028-02-29T23:59", "2028-02-29", "2028-03-01"),
        (Period.MONTH, "2026-12-31T01:00", "2026-12-01", "2027-01-01"),
        (Period.MONTH, "2026-01-01", "2026-01-01", "2026-02-01"),
    ],
)
def test_windows_are_utc_days_and_calendar_months(period: Period, now: str, start: str, end: str) -> None:
    moment, first, last = (datetime.fromisoformat(text).replace(tzinfo=UTC) for text in (now, start, end))
    assert window_start(period, moment) == first
    assert window_end(period, first) == last


def test_slices_leave_half_of_what_remains_to_the_others() -> None:
    assert slice_size(10, ahead_of_use(500.0), 100_000, 4) == 3000
    assert slice_size(10, 3000, 8_000, 4) == 1000
    assert slice_size(10, 3000, 40, 4) == 10
    assert (surplus(100, 30), surplus(50, 30)) == (40, 0)
    assert (ahead_of_peak(50.0, 100), ahead_of_peak(5.0, 100), ahead_of_peak(5.0, 7)) == (12, 5, 0)


def test_a_hold_is_left_once_and_spends_no_more_than_it_reserved() -> None:
    lease = Lease(WindowId("q", datetime(2026, 1, 1, tzinfo=UTC)), "r", Unit.TOKENS, granted=100)
    hold = Hold([lease])
    assert hold.reserve({Unit.TOKENS: 60})
    assert not hold.reserve({Unit.TOKENS: 101})
    with pytest.raises(ValueError, match="usage exceeds the hold"):
        hold.settle({Unit.TOKENS: 61})
    assert [charge.amount for charge in hold.settle({Unit.TOKENS: 40})] == [40]
    assert (lease.settled, lease.held, lease.free) == (40, 0, 60)
    with pytest.raises(ValueError, match="already"):
        hold.settle({Unit.TOKENS: 0})


def test_leases_are_refilled_ahead_of_steady_use_while_quota_is_left() -> None:
    window = WindowId("q", datetime(2026, 1, 1, tzinfo=UTC))
    limit = Limit("q", WHOLE, LimitKind.TOKENS_PER_DAY, 10_000)

    def running_low(
        free: int, *, remaining: int | None = 9_000, now_s: float = 100.0, meter: Meter = Meter.STOCK
    ) -> int:
        account = Account(Lease(window, "r", Unit.TOKENS, granted=free, meter=meter), limit, used_s=100.0)
        account.use_per_s, account.remaining = 50.0, remaining
        return max(0, account.balance(now_s))

    ahead = ahead_of_use(50.0)
    assert (running_low(ahead), running_low(ahead - 1)) == (0, ahead // 2 + 1)
    assert surplus(ahead + ahead // 2, ahead) == 0, "what was asked for does not go back"
    assert running_low(0, remaining=2_499) == 0, "near the cap others want it"
    assert running_low(0, remaining=None) == 0, "the store was not asked yet"
    assert running_low(0, now_s=131.0) == 0, "nobody uses it any more"
    assert running_low(0, meter=Meter.SLOTS) == 0, "slots come back by themselves"


async def test_a_cap_that_was_lowered_below_a_request_refuses_it_before_the_lease_is_returned(
    database: Database,
) -> None:
    await set_caps(database, {WHOLE: 100_000})
    enforcer = QuotaEnforcer(database, LeaseStore("replica", 20.0), FrozenClock(), tick_s=60.0)
    await enforcer.start()
    try:
        (await enforcer.hold([WHOLE], {Unit.TOKENS: 600})).settle({Unit.TOKENS: 0})
        await change(database, WHOLE, 0)
        enforcer.forget(WHOLE)
        with pytest.raises(RequestExceedsQuota):
            await enforcer.hold([WHOLE], {Unit.TOKENS: 500})
    finally:
        await enforcer.stop()

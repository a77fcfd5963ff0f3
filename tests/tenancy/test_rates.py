"""Rate limits and concurrency limits: replicas share one bucket, and slots of a lost replica are released."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select
from tests.database_clock import DatabaseClock

from moiety_platform.clock import ManualClock, SystemClock
from moiety_platform.db.session import Database
from moiety_platform.quota.bucket import Bucket
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.errors import QuotaExceeded
from moiety_platform.quota.kinds import LimitKind, LimitLevel, Scope, Unit
from moiety_platform.quota.models import Quota, QuotaLease, QuotaWindow
from moiety_platform.quota.rate_limit_headers import LimitStatus, duration, headers
from moiety_platform.quota.store import LeaseStore

from .conftest import hold_without_rounds

TENANT = Scope(LimitLevel.TENANT, "tenant")
ONE = {Unit.REQUESTS: 1, Unit.SLOTS: 1}


async def set_limit(database: Database, kind: LimitKind, cap: int) -> None:
    async with database.write() as session:
        quota = Quota(id=kind.value, level=TENANT.level, scope_id=TENANT.id, kind=kind, cap=cap)
        quota.created_at = datetime.now(UTC)
        session.add(quota)


@given(
    cap=st.integers(0, 10_000),
    steps=st.lists(st.tuples(st.integers(0, 90_000), st.integers(0, 12_000)), max_size=40),
)
def test_in_any_stretch_of_time_no_more_is_taken_than_the_cap_and_what_refilled(
    cap: int, steps: list[tuple[int, int]]
) -> None:
    bucket, now_ms, taken = Bucket(cap), 0, list[tuple[int, int]]()
    for passed_ms, wanted in steps:
        now_ms += passed_ms
        bucket = bucket.at(now_ms)
        amount = min(wanted, bucket.remaining)
        bucket = bucket.take(amount)
        taken.append((now_ms, amount))
    for first, (start_ms, _) in enumerate(taken):
        for last in range(first, len(taken)):
            total = sum(amount for _, amount in taken[first : last + 1])
            assert total <= cap * (1 + (taken[last][0] - start_ms) / 60_000) + 1e-6


def test_a_bucket_gives_what_was_put_back_and_bears_a_clock_that_goes_back() -> None:
    bucket = Bucket(60).at(1_000_000).take(60)
    assert bucket.remaining == 0
    assert bucket.take(-10).remaining == 10
    assert bucket.at(500_000) == bucket
    assert bucket.at(1_000_999).remaining == 0
    assert bucket.at(1_001_000).remaining == 1
    assert bucket.at(9_000_000).remaining == 60


def test_a_lowered_cap_lets_something_through_within_a_minute() -> None:
    full = Bucket(1_000_000).at(1_000_000).take(1_000_000)
    lowered = Bucket(1_000, full.debt, full.at_ms)
    assert lowered.at(1_000_000).remaining == 0
    assert lowered.at(1_060_000).remaining == 1_000


async def start_keepers(database: Database) -> list[QuotaEnforcer]:
    """Start the quota enforcers of three replicas."""
    enforcers = [
        QuotaEnforcer(database, LeaseStore(f"r-{n}", 20.0), SystemClock(), tick_s=0.1, answer_s=30.0) for n in range(3)
    ]
    for enforcer in enforcers:
        await enforcer.start()
    return enforcers


async def test_replicas_draw_from_one_bucket(database: Database) -> None:
    await set_limit(database, LimitKind.REQUESTS_PER_MINUTE, 120)
    enforcers = await start_keepers(database)
    loop, let_through = asyncio.get_running_loop(), 0
    began = loop.time()

    async def client(enforcer: QuotaEnforcer) -> None:
        nonlocal let_through
        while let_through < 120 + 8:
            try:
                (await enforcer.hold([TENANT], ONE)).settle(ONE)
                let_through += 1
            except QuotaExceeded:
                await asyncio.sleep(0.05)

    async with asyncio.timeout(60):
        await asyncio.gather(*(client(enforcer) for enforcer in enforcers for _ in range(4)))
    passed_s = loop.time() - began
    for enforcer in enforcers:
        await enforcer.stop()
    assert 120 + 8 <= let_through <= 120 + 2 * passed_s


async def test_slots_are_bounded_over_replicas_and_come_back(database: Database) -> None:
    await set_limit(database, LimitKind.CONCURRENT_REQUESTS, 10)
    enforcers = await start_keepers(database)
    open_now = most = num_refused = done = 0
    many_are_open = asyncio.Event()

    async def client(enforcer: QuotaEnforcer) -> None:
        nonlocal open_now, most, num_refused, done
        num_served = 0
        while num_served < 4:
            try:
                hold = await enforcer.hold([TENANT], ONE)
            except QuotaExceeded:
                num_refused += 1
                await asyncio.sleep(0.1)
                continue
            open_now, most = open_now + 1, max(most, open_now + 1)
            if most >= 8:
                many_are_open.set()
            await many_are_open.wait()
            await asyncio.sleep(0.02)
            open_now, num_served, done = open_now - 1, num_served + 1, done + 1
            hold.settle({Unit.REQUESTS: 1})

    async with asyncio.timeout(120):
        await asyncio.gather(*(client(enforcer) for enforcer in enforcers for _ in range(8)))
    assert 8 <= most <= 10
    assert num_refused > 0
    assert done == 4 * 24
    for enforcer in enforcers:
        await enforcer.stop()
    async with database.read() as session:
        window = (await session.scalars(select(QuotaWindow))).one()
    assert (window.granted, window.settled) == (0, 0)


async def test_the_slots_of_a_replica_that_is_gone_are_free_again(database: Database, time: DatabaseClock) -> None:
    await set_limit(database, LimitKind.CONCURRENT_REQUESTS, 2)
    leases = [LeaseStore(name, 20.0, now=time.now) for name in ("gone", "other")]
    gone, other = (QuotaEnforcer(database, store, SystemClock()) for store in leases)
    for _ in range(2):
        await hold_without_rounds(gone, TENANT, ONE)
    with pytest.raises(QuotaExceeded, match="limit of 2 concurrent_requests is reached"):
        await hold_without_rounds(other, TENANT, ONE)
    time.advance(19.0)
    async with database.write() as session:
        assert await leases[1].release_expired(session) == 0
    time.advance(2.0)
    async with database.write() as session:
        assert await leases[1].release_expired(session) == 1
    async with database.read() as session:
        assert (await session.scalars(select(QuotaLease.replica_id))).all() in ([], ["other"])
    hold = await hold_without_rounds(QuotaEnforcer(database, leases[1], SystemClock()), TENANT, ONE)
    hold.settle({Unit.REQUESTS: 1})


async def test_slots_that_were_swept_are_not_given_back_again(database: Database, time: DatabaseClock) -> None:
    await set_limit(database, LimitKind.CONCURRENT_REQUESTS, 10)
    leases = [LeaseStore("cut off", 20.0, now=time.now), LeaseStore("other", 60.0, now=time.now)]
    cut_off, other = (QuotaEnforcer(database, store, SystemClock(), tick_s=60.0) for store in leases)
    streams = [await hold_without_rounds(cut_off, TENANT, ONE) for _ in range(6)]
    time.advance(21.0)
    async with database.write() as session:
        await leases[1].release_expired(session)
    for _ in range(10):
        await hold_without_rounds(other, TENANT, ONE)
    for stream in streams[:4]:
        stream.settle({Unit.REQUESTS: 1})
    await cut_off.transact()
    async with database.read() as session:
        window = (await session.scalars(select(QuotaWindow))).one()
    assert window.granted == 10
    assert cut_off.extend_now(streams[5], ONE), "a running stream asks for no slot again"
    with pytest.raises(QuotaExceeded):
        await hold_without_rounds(cut_off, TENANT, ONE)


async def test_a_lease_of_which_a_running_request_holds_nothing_is_not_forgotten(database: Database) -> None:
    await set_limit(database, LimitKind.MONEY_PER_DAY, 1_000)
    clock = ManualClock(datetime(2026, 1, 1, tzinfo=UTC))
    enforcer = QuotaEnforcer(database, LeaseStore("r", 20.0), clock)
    free = {Unit.MONEY: 0}
    waiting = asyncio.create_task(enforcer.hold([TENANT], free))
    while not waiting.done():
        await asyncio.wait({waiting}, timeout=0.01)
        await enforcer.transact()
    hold = await waiting
    for _ in range(20):
        clock.advance(10.0)
        await enforcer.transact()
    assert enforcer.extend_now(hold, free)
    hold.settle(free)
    for _ in range(20):
        clock.advance(10.0)
        await enforcer.transact()
    assert not enforcer._accounts


def test_headers_name_the_tightest_of_each_kind() -> None:
    wide, narrow = (
        LimitStatus(LimitKind.REQUESTS_PER_MINUTE, 60, 50, 10.0),
        LimitStatus(LimitKind.REQUESTS_PER_MINUTE, 20, 5, 45.0),
    )
    fields = headers([wide, narrow, LimitStatus(LimitKind.CONCURRENT_REQUESTS, 4, 3, None)])
    assert fields["x-ratelimit-remaining-requests"] == "5"
    assert fields["x-ratelimit-reset-requests"] == "45s"
    assert fields["ratelimit-policy"] == '"requests_per_minute";q=20;w=60, "concurrent_requests";q=4'
    assert fields["ratelimit"] == '"requests_per_minute";r=5;t=45, "concurrent_requests";r=3'
    assert headers([]) == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0ms"), (0.02, "20ms"), (1.5, "1.5s"), (59.0, "59s"), (360.0, "6m0s"), (61.4, "1m1s")]
)
def test_durations_have_openais_form(seconds: float, text: str) -> None:
    assert duration(seconds) == text

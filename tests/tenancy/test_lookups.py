"""Lookups of unknown keys are bounded and do not delay or fail requests with known keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import AsyncAdaptedQueuePool
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth import known_ids
from moiety_platform.auth.authenticator import MAX_UNKNOWN_WAITING, OUTAGE_PAUSE_S, TTL_S, Authenticator
from moiety_platform.auth.keys import generate_key
from moiety_platform.auth.known_ids import KnownKeyIds
from moiety_platform.auth.lookups import LookupQueue, StoreHealth
from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key, revoke_key
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import PlatformError, Unavailable

from .conftest import PEPPER, Demo

KNOWN, UNKNOWN = "key-lookup-known", "key-lookup-unknown"


class HeldDatabase(Database):
    """A store that keeps the reads of some tasks waiting until `release`, and fails those of others."""

    held: str = ""  # the name of tasks that wait
    failing: str = ""  # the name of tasks that are not answered in time
    num_waiting = 0
    most_waiting = 0
    gate: asyncio.Event
    holds: asyncio.Event  # set once a read waits

    @asynccontextmanager
    async def read_statements(self) -> AsyncIterator[AsyncSession]:
        task = asyncio.current_task()
        assert task is not None
        if task.get_name() == self.failing:
            raise Unavailable("not in time") from TimeoutError()
        if task.get_name() == self.held:
            self.num_waiting += 1
            self.holds.set()
            self.most_waiting = max(self.most_waiting, self.num_waiting)
            try:
                await self.gate.wait()
            finally:
                self.num_waiting -= 1
        async with super().read_statements() as session:
            yield session


@pytest.fixture
async def store(database: Database) -> HeldDatabase:
    held = HeldDatabase(database.engine, database.opened)
    held.gate, held.holds = asyncio.Event(), asyncio.Event()
    return held


@pytest.fixture
async def authenticator(store: HeldDatabase, demo: Demo, clock: ManualClock) -> AsyncIterator[Authenticator]:
    made = Authenticator(store, PEPPER, clock)
    await made.read_key_ids()
    yield made
    await made.close()


async def answer(authenticator: Authenticator, key: str) -> int:
    try:
        await authenticator.authenticate(f"Bearer {key}")
    except PlatformError as error:
        return error.status
    return 200


async def flood(authenticator: Authenticator, number: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(answer(authenticator, generate_key().text)) for _ in range(number)]
    for _ in range(5):  # until all of them wait
        await asyncio.sleep(0)
    return tasks


async def test_strangers_share_one_statement_and_those_beyond_a_bound_are_refused_at_once(
    authenticator: Authenticator, store: HeldDatabase
) -> None:
    store.held = UNKNOWN
    first = await flood(authenticator, 1)
    await store.holds.wait()
    rest = await flood(authenticator, MAX_UNKNOWN_WAITING + 300)
    refused = [task for task in rest if task.done()]
    assert [task.result() for task in refused] == [503] * 300
    assert store.most_waiting == 1
    sent = store.num_statements
    store.gate.set()
    assert await asyncio.gather(*first, *(task for task in rest if task not in refused)) == [401] * (
        MAX_UNKNOWN_WAITING + 1
    )
    assert store.most_waiting == 1
    assert store.num_statements - sent <= 6  # transactions that are opened count as well


async def test_a_known_key_is_accepted_at_its_first_use_while_lookups_of_unknown_keys_hang(
    authenticator: Authenticator, store: HeldDatabase, demo: Demo
) -> None:
    store.held = UNKNOWN
    strangers = await flood(authenticator, MAX_UNKNOWN_WAITING + 300)
    assert await answer(authenticator, demo.key) == 200
    assert await answer(authenticator, demo.admin_key) == 200
    await store.holds.wait()
    assert store.num_waiting == 1
    store.gate.set()
    await asyncio.gather(*strangers)


async def test_a_revocation_applies_after_two_seconds_while_lookups_of_unknown_keys_hang(
    authenticator: Authenticator, store: HeldDatabase, database: Database, demo: Demo, clock: ManualClock
) -> None:
    assert await answer(authenticator, demo.key) == 200
    store.held = UNKNOWN
    strangers = await flood(authenticator, MAX_UNKNOWN_WAITING + 300)
    async with database.write() as session:
        await revoke_key(session, demo.key_id, clock.now())
    clock.advance(TTL_S)
    assert await answer(authenticator, demo.key) == 401
    store.gate.set()
    await asyncio.gather(*strangers)


async def test_failed_lookups_of_unknown_keys_do_not_affect_known_ones(
    authenticator: Authenticator, store: HeldDatabase, demo: Demo, clock: ManualClock
) -> None:
    store.failing = UNKNOWN
    for _ in range(5):
        assert await answer(authenticator, generate_key().text) == 503
        clock.advance(OUTAGE_PAUSE_S)
    assert await answer(authenticator, demo.key) == 200
    store.failing = ""
    clock.advance(OUTAGE_PAUSE_S)
    assert await answer(authenticator, generate_key().text) == 401


async def test_one_look_up_that_times_out_fails_no_other(
    authenticator: Authenticator, store: HeldDatabase, demo: Demo
) -> None:
    store.failing = KNOWN
    assert await answer(authenticator, demo.key) == 503
    store.failing = ""
    assert await answer(authenticator, demo.admin_key) == 200
    assert await answer(authenticator, demo.key) == 200


async def test_a_key_that_another_gateway_has_just_made_is_served_before_its_id_is_known_here(
    authenticator: Authenticator, database: Database, demo: Demo, clock: ManualClock
) -> None:
    strangers = await flood(authenticator, 500)
    async with database.write() as session:
        _, text = await create_key(session, NewKey(name="new", project_id=demo.project_id), PEPPER, clock.now())
    assert await answer(authenticator, text.text) == 200
    assert set(await asyncio.gather(*strangers)) == {401}


async def test_clients_that_leave_take_no_look_up_along_and_keep_no_connection(
    authenticator: Authenticator, store: HeldDatabase, demo: Demo
) -> None:
    store.held = UNKNOWN
    strangers = await flood(authenticator, 600)
    for task in strangers:
        task.cancel()
    await asyncio.gather(*strangers, return_exceptions=True)
    store.gate.set()
    assert await answer(authenticator, generate_key().text) == 401  # the queue continues
    pool = store.engine.pool
    assert isinstance(pool, AsyncAdaptedQueuePool)
    assert pool.checkedout() == 0
    assert authenticator.num_waiting == 0


async def test_waiting_lookups_are_refused_when_the_authenticator_is_closed(
    authenticator: Authenticator, store: HeldDatabase, demo: Demo
) -> None:
    store.held = UNKNOWN
    strangers = await flood(authenticator, 20)
    await authenticator.close()
    assert set(await asyncio.gather(*strangers)) == {503}


async def test_a_look_up_that_is_older_than_a_revocation_made_here_answers_nobody_who_comes_later(
    authenticator: Authenticator, store: HeldDatabase, database: Database, demo: Demo, clock: ManualClock
) -> None:
    store.held = KNOWN
    before = asyncio.create_task(answer(authenticator, demo.key))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    async with database.write() as session:
        await revoke_key(session, demo.key_id, clock.now())
    authenticator.forget(demo.key_id)
    after = asyncio.create_task(answer(authenticator, demo.key))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert store.num_waiting == 2
    store.gate.set()
    assert await asyncio.gather(before, after) == [401, 401]


async def test_ids_are_read_page_by_page_and_later_only_those_of_new_keys(
    database: Database, demo: Demo, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_ids, "PAGE_ROWS", 3)
    made = []
    for number in range(10):  # several at one moment
        clock.advance(number % 2)
        async with database.write() as session:
            key, _ = await create_key(
                session, NewKey(name=f"k{number}", project_id=demo.project_id), PEPPER, clock.now()
            )
        made.append(key.id)
    ids = KnownKeyIds()
    await ids.refresh(database)
    assert all(key_id in ids for key_id in made)
    assert generate_key().key_id not in ids
    assert len(ids) == 12
    late_at = clock.now() - timedelta(minutes=1)  # by another gateway's clock
    async with database.write() as session:
        late, _ = await create_key(session, NewKey(name="late", project_id=demo.project_id), PEPPER, late_at)
    await ids.refresh(database)
    assert late.id in ids


async def test_ids_beyond_the_bound_are_not_kept() -> None:
    ids = KnownKeyIds(max_ids=5)
    for _ in range(10):
        ids.add(generate_key().key_id)
    assert len(ids) == 5


async def test_a_defect_of_a_read_fails_those_who_wait_for_it_and_not_those_who_come_later(clock: ManualClock) -> None:
    broken = True

    async def read(key_ids: Sequence[str]) -> dict[str, str]:
        await asyncio.sleep(0)
        if broken:
            raise ZeroDivisionError
        return dict.fromkeys(key_ids, "found")

    queue = LookupQueue("test", read, clock, max_statements=1, max_waiting=10, max_batch=2)
    with pytest.raises(Unavailable):
        await queue.begin("a")
    broken = False
    assert await asyncio.gather(*(queue.begin(name) for name in "abcde")) == ["found"] * 5
    assert queue.num_waiting == 0


async def test_ids_that_come_soon_after_one_another_are_read_by_one_statement(clock: ManualClock) -> None:
    statements = []

    async def read(key_ids: Sequence[str]) -> dict[str, str]:
        statements.append(list(key_ids))
        return dict.fromkeys(key_ids, "found")

    queue = LookupQueue("test", read, clock, max_statements=1, max_waiting=10, max_batch=10, gather_s=0.01)
    lookups = []
    for name in "abc":
        lookups.append(queue.begin(name))
        await asyncio.sleep(0)
    assert await asyncio.gather(*lookups) == ["found"] * 3
    assert statements == [["a", "b", "c"]]


def test_the_store_counts_as_away_after_a_broken_connection_or_two_time_outs_and_no_later_answer(
    clock: ManualClock,
) -> None:
    health = StoreHealth(clock, OUTAGE_PAUSE_S)
    assert not health.failed(1.0, timed_out=True)
    assert not health.is_unreachable
    health.answered(2.0)
    assert not health.failed(1.5, timed_out=False), "a later one was answered"
    assert not health.failed(3.0, timed_out=True)
    assert health.failed(3.0, timed_out=True)
    assert health.is_unreachable
    assert health.is_paused
    clock.advance(OUTAGE_PAUSE_S)
    assert not health.is_paused
    health.answered(4.0)
    assert not health.is_unreachable
    assert health.failed(5.0, timed_out=False)

"""Stored responses in the database: limits of a tenant's storage, and deletion of a tenant. On both databases."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import event, func, select
from tests.database_clock import DatabaseClock

from moiety_platform.access.roles import Role
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.principal import Principal
from moiety_platform.auth.row_scope import tenant_of
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import NotFound, RateLimited, Unavailable
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.responses_api.event_log import EventChunk
from moiety_platform.responses_api.items import Continued, message_item, text_part
from moiety_platform.responses_api.limits import ConversationLimits
from moiety_platform.responses_api.models import StoredResponse
from moiety_platform.responses_api.response_service import ResponseService
from moiety_platform.responses_api.storage_limit import StorageLimit
from moiety_platform.responses_api.store import ResponseStore
from moiety_platform.tenant_deletion.service import TenantDeleter

from .conftest import PEPPER, CuttableStore, Demo, make_demo

BODY = b'{"output":[%b]}'
LIMITS = ConversationLimits(ttl_s=60, storage=StorageLimit(10, 10_000), max_items=1000, max_bytes=10_000)


@pytest.fixture
async def whose(database: Database, clock: ManualClock, demo: Demo) -> Principal:
    return await Authenticator(database, PEPPER, clock).authenticate(f"Bearer {demo.key}")


def response_id(number: int) -> str:
    return f"resp_{number:032x}"


async def keep(
    service: ResponseService, whose: Principal, number: int, after: int | None = None, size: int = 9
) -> bool:
    continued = Continued() if after is None else await service.continued(whose, response_id(after))
    item = {"id": f"msg_{number}", **message_item([text_part("x" * size)])}
    return await service.keep(whose, response_id(number), "m", continued, [item], BODY % b"")


async def sums(database: Database) -> tuple[int, int]:
    async with database.read() as session:
        found = await session.execute(select(func.count(), func.sum(StoredResponse.num_bytes)))
        num_responses, num_bytes = found.one()
        return num_responses, int(num_bytes or 0)


@pytest.mark.parametrize("storage", [StorageLimit(5, 10_000), StorageLimit(100, 1100)])
async def test_concurrent_responses_at_two_gateways_are_stored_up_to_the_limit(
    database: Database, second: Database, whose: Principal, storage: StorageLimit
) -> None:
    services = [ResponseService(one, replace(LIMITS, storage=storage)) for one in (database, second)]
    kept = await asyncio.gather(*(keep(services[number % 2], whose, number, size=50) for number in range(20)))
    num_responses, num_bytes = await sums(database)
    one = num_bytes // num_responses
    assert (sum(kept), num_responses) == (5, 5)
    assert num_bytes <= storage.max_bytes
    assert num_responses == storage.max_responses or num_bytes + one > storage.max_bytes
    if storage.max_responses == 5:
        with pytest.raises(RateLimited):
            await services[0].require_capacity(whose)
    await services[0].require_capacity(replace(whose, tenant_id="ten_other"))


async def test_a_conversation_is_read_in_order_however_long_it_is_and_only_whole(
    database: Database, whose: Principal, time: DatabaseClock
) -> None:
    limits = replace(LIMITS, storage=StorageLimit(1000, 10**9), max_bytes=10**9)
    service = ResponseService(database, limits, ResponseStore(time.now))
    for number in range(60):
        assert await keep(service, whose, number, number - 1 if number else None)
    whole = await service.continued(whose, response_id(59))
    assert [item["id"] for item in whole.items] == [f"msg_{number}" for number in range(60)]
    assert whole.num_bytes == (await sums(database))[1]
    assert len((await service.continued(whose, response_id(29))).items) == 30
    await service.delete(whose, response_id(30))
    with pytest.raises(NotFound, match="no longer stored"):
        await service.continued(whose, response_id(59))
    assert len((await service.continued(whose, response_id(29))).items) == 30


async def test_expired_responses_are_not_found_and_are_purged_in_batches(
    database: Database, whose: Principal, time: DatabaseClock
) -> None:
    limits = replace(LIMITS, storage=StorageLimit(1000, 10**9))
    store = ResponseStore(time.now)
    service = ResponseService(database, limits, store)
    for number in range(7):
        assert await keep(service, whose, number)
    time.ms += 60_000
    assert await keep(service, whose, 7)
    with pytest.raises(NotFound):
        await service.body(whose, response_id(0))
    async with database.write() as session:
        assert await store.purge(session, 5) == 5
    for max_bytes in (1, (await sums(database))[1]):  # one, whatever its size; then as many as there are
        async with database.write() as session:
            assert await store.purge(session, max_bytes=max_bytes) == 1
    assert (await sums(database))[0] == 1
    assert await service.body(whose, response_id(7)) == BODY % b""


async def test_a_running_response_counts_its_events_without_being_read(database: Database, whose: Principal) -> None:
    service, item = ResponseService(database, LIMITS), {"id": "msg_1", **message_item([text_part("x")])}
    assert await service.keep(whose, response_id(1), "m", Continued(), [item], BODY % b"", 60_000, has_events=True)
    size_before = (await sums(database))[1] - len(BODY % b"")
    statements: list[str] = []
    engine = database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
    chunks = [EventChunk(number, 1, b"x" * 10) for number in range(3)]
    await service.add_events({response_id(1): chunks[:1]})
    await service.add_events({response_id(1): chunks[:2]})  # the first one again, as after a lost commit
    body = BODY.replace(b"}", b',"status":"completed"}') % b'{"id":"msg_2"}'
    assert await service.update_run(response_id(1), body, ends=True, events=chunks[2:], num_events=3) == body
    assert not any("responses.body," in one or "responses.items" in one for one in statements)
    async with database.read() as session:
        (row,) = (await session.scalars(select(StoredResponse))).all()
    assert (row.body, row.num_items, row.num_events, row.running_until_ms) == (body, 2, 3, None)
    assert row.num_bytes == row.total_bytes + 30 == size_before + len(body) + 30


async def test_events_of_a_tenant_without_storage_are_stored_no_more(database: Database, whose: Principal) -> None:
    service = ResponseService(database, replace(LIMITS, storage=StorageLimit(10, 100_000)))
    assert await service.keep(whose, response_id(1), "m", Continued(), [], BODY % b"", 60_000, has_events=True)
    first, second, third = (EventChunk(number, 1, b"x" * 50_000) for number in range(3))
    assert await service.add_events({response_id(1): [first]}) == set()
    assert await service.add_events({response_id(1): [second]}) == {response_id(1)}
    service.limits = replace(LIMITS, storage=StorageLimit(10, 120_000))
    assert await service.add_events({response_id(1): [second]}) == set()
    assert await service.update_run(response_id(1), BODY % b"", ends=True, events=[third], num_events=3)
    assert [chunk.first_number for chunk in await service.events(response_id(1), 0)] == [0, 1]
    assert (await sums(database))[1] < 120_000


async def test_nothing_is_kept_of_a_tenant_once_its_erasure_has_begun(
    database: Database, objects: ObjectStore, clock: ManualClock, whose: Principal
) -> None:
    service = ResponseService(database, LIMITS)
    assert await keep(service, whose, 1)
    eraser = TenantDeleter(AuditedStore(database, "root", Role.OWNER, tenant_of, clock), whose.tenant_id, objects)
    await eraser.begin()
    assert not await keep(service, whose, 2)
    done = await eraser.work(60.0)
    assert done.counts["responses"] == 1
    assert await sums(database) == (0, 0)


async def test_a_store_that_is_away_refuses_what_needs_it_and_loses_what_was_made(
    cuttable: CuttableStore, clock: ManualClock
) -> None:
    demo = await make_demo(cuttable.database, clock)
    whose = await Authenticator(cuttable.database, PEPPER, clock).authenticate(f"Bearer {demo.key}")
    service = ResponseService(cuttable.database, LIMITS)
    assert await keep(service, whose, 1)
    await cuttable.wire.cut()
    for call in (
        service.require_capacity(whose),
        service.continued(whose, response_id(1)),
        service.body(whose, response_id(1)),
        service.input_items(whose, response_id(1)),
        service.delete(whose, response_id(1)),
    ):
        with pytest.raises(Unavailable):
            await call
    assert not await keep(service, whose, 2)
    await cuttable.wire.mend()
    assert await keep(service, whose, 3, after=1)
    assert (await sums(cuttable.steady))[0] == 2

"""Stored conversations in the database, changed by two gateways at once. On both databases."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest
from sqlalchemy import func, select
from tests.database_clock import DatabaseClock

from moiety_platform.access.roles import Role
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.principal import Principal
from moiety_platform.auth.row_scope import tenant_of
from moiety_platform.clock import ManualClock
from moiety_platform.db.keyset import ListRequest
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, NotFound, RateLimited
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.responses_api.conversation_locks import LOCK_MS, ConversationLocks
from moiety_platform.responses_api.conversation_schemas import ConversationObject
from moiety_platform.responses_api.conversation_service import ConversationService
from moiety_platform.responses_api.conversation_store import ConversationStore
from moiety_platform.responses_api.event_log import EventLog
from moiety_platform.responses_api.items import Continued, Item, message_item, text_part
from moiety_platform.responses_api.limits import ConversationLimits
from moiety_platform.responses_api.models import ConversationItem, StoredConversation, StoredEvents
from moiety_platform.responses_api.response_service import ResponseService
from moiety_platform.responses_api.storage_limit import StorageLimit
from moiety_platform.responses_api.store import ResponseStore
from moiety_platform.tenant_deletion.service import TenantDeleter

from .test_response_store import BODY, LIMITS, response_id, whose  # noqa: F401  fixtures

LARGE_LIMITS = replace(LIMITS, storage=StorageLimit(100, 10**6), max_bytes=10**6)


def message(text: str) -> Item:
    return message_item([text_part(text)])


def services_of(
    database: Database, limits: ConversationLimits = LARGE_LIMITS
) -> tuple[ResponseService, ConversationService]:
    responses = ResponseService(database, limits)
    return responses, ConversationService(database, responses, ConversationStore())


def timed_service(database: Database, time: DatabaseClock) -> tuple[ConversationStore, ConversationService]:
    store = ConversationStore(time.now)
    return store, ConversationService(database, ResponseService(database, LARGE_LIMITS, ResponseStore(time.now)), store)


async def texts(service: ConversationService, whose: Principal, conversation_id: str) -> list[str]:  # noqa: F811
    items, has_more = await service.page(whose, conversation_id, ListRequest(1000, newest_first=False))
    assert not has_more
    return [item["content"][0]["text"] for item in items]


async def begin_conversation(
    responses: ResponseService,
    service: ConversationService,
    whose: Principal,  # noqa: F811
) -> tuple[ConversationObject, Continued]:
    """Return a new conversation, and what a response continues it with."""
    made = await service.create(whose, [message("x")], {})
    return made, await responses.continued_conversation(whose, made["id"])


async def count(database: Database, table: type) -> int:
    async with database.read() as session:
        return int(await session.scalar(select(func.count()).select_from(table)) or 0)


async def test_responses_and_additions_at_two_gateways_keep_their_items_together(
    database: Database,
    second: Database,
    whose: Principal,  # noqa: F811
) -> None:
    gateways = [services_of(one) for one in (database, second)]
    made = await gateways[0][1].create(whose, [], {})

    async def respond(number: int) -> None:
        responses, _ = gateways[number % 2]
        continued = await responses.continued_conversation(whose, made["id"])
        output = msgspec.json.encode({"id": f"o{number}", **message(f"{number} c")})
        items = [{"id": f"a{number}", **message(f"{number} a")}, {"id": f"b{number}", **message(f"{number} b")}]
        assert await responses.keep(
            whose, response_id(number), "m", continued, items, b'{"output":[%b]}' % output, stores=number % 3 == 0
        )

    async def add(number: int) -> None:
        await gateways[number % 2][1].add_items(whose, made["id"], [message(f"{number} {part}") for part in "abc"])

    await asyncio.gather(*(respond(number) for number in range(10)), *(add(number) for number in range(10, 20)))
    found = await texts(gateways[1][1], whose, made["id"])
    numbers = [text.split()[0] for text in found[::3]]
    assert sorted(numbers, key=int) == [str(number) for number in range(20)]
    assert found == [f"{number} {part}" for number in numbers for part in "abc"]
    async with database.read() as session:
        row = await session.get_one(StoredConversation, made["id"])
        total = await session.scalar(select(func.sum(ConversationItem.num_bytes)))
    assert (row.num_items, row.next_position, row.num_bytes) == (60, 60, int(total or 0) + len("{}"))


async def test_one_of_the_responses_at_two_gateways_locks_a_conversation_until_its_end_or_its_gateways(
    database: Database,
    second: Database,
    whose: Principal,  # noqa: F811
    time: DatabaseClock,
) -> None:
    store, service = timed_service(database, time)
    locks = [ConversationLocks(one, store) for one in (database, second)]
    made = (await service.create(whose, [], {}))["id"]
    tries = [locks[number % 2].acquire(whose, made, response_id(number)) for number in range(8)]
    refused = await asyncio.gather(*tries, return_exceptions=True)
    (winner,) = [number for number, error in enumerate(refused) if error is None]
    assert {error.code for error in refused if isinstance(error, BadRequest)} == {"conversation_locked"}
    for number in set(range(8)) - {winner}:
        await locks[0].release(made, response_id(number))  # of those that never had it
    time.ms += LOCK_MS - 1
    await locks[0].extend([response_id(winner)])
    time.ms += LOCK_MS - 1
    with pytest.raises(BadRequest):
        await locks[1].acquire(whose, made, response_id(8))
    time.ms += 1  # its gateway has died
    await locks[1].acquire(whose, made, response_id(8))
    await locks[0].release(made, response_id(winner))
    with pytest.raises(BadRequest):
        await locks[0].acquire(whose, made, response_id(9))
    await locks[1].release(made, response_id(8))
    await locks[0].acquire(whose, made, response_id(9))
    for other in (replace(whose, project_id="prj_other"), replace(whose, tenant_id="ten_other")):
        await locks[0].acquire(other, made, response_id(1))  # it does not learn that there is one


async def test_other_projects_tenants_and_models_do_not_find_a_conversation(
    database: Database,
    whose: Principal,  # noqa: F811
) -> None:
    responses, service = services_of(database)
    made, continued = await begin_conversation(responses, service, whose)
    assert await responses.keep(whose, response_id(1), "m", continued, [], BODY % b"", stores=False)
    assert await service.get(replace(whose, allowed_models=frozenset({"m", "n"})), made["id"]) == made
    for other in (
        replace(whose, project_id="prj_other"),
        replace(whose, tenant_id="ten_other"),
        replace(whose, allowed_models=frozenset({"n"})),
    ):
        for call in (
            service.get(other, made["id"]),
            service.add_items(other, made["id"], []),
            service.change(other, made["id"], {}),
            service.delete(other, made["id"]),
            service.item(other, made["id"], "x"),
            responses.continued_conversation(other, made["id"]),
        ):
            with pytest.raises(NotFound):
                await call


async def test_expired_conversations_are_purged_with_their_items_and_a_new_item_keeps_one(
    database: Database,
    whose: Principal,  # noqa: F811
    time: DatabaseClock,
) -> None:
    store, service = timed_service(database, time)
    old, kept = [await service.create(whose, [message("x")], {}) for _ in range(2)]
    time.ms += 40_000
    await service.add_items(whose, kept["id"], [message("y")])
    time.ms += 30_000
    with pytest.raises(NotFound):
        await service.get(whose, old["id"])
    async with database.write() as session:
        assert await store.purge(session) == 1
    assert await texts(service, whose, kept["id"]) == ["x", "y"]
    assert (await count(database, StoredConversation), await count(database, ConversationItem)) == (1, 2)


async def test_items_beyond_the_tenants_room_are_refused_and_nothing_is_added(
    database: Database,
    whose: Principal,  # noqa: F811
) -> None:
    responses, service = services_of(database, replace(LARGE_LIMITS, storage=StorageLimit(100, 2000)))
    made = await service.create(whose, [message("x")], {})
    with pytest.raises(RateLimited):
        await service.add_items(whose, made["id"], [message("y" * 1000), message("z" * 1000)])
    continued = await responses.continued_conversation(whose, made["id"])
    assert not await responses.keep(
        whose, response_id(1), "m", continued, [], b'{"output":[],"x":"%b"}' % (b"x" * 2000)
    )
    assert await texts(service, whose, made["id"]) == ["x"]


async def test_a_deleted_tenant_leaves_no_conversation_and_no_event(
    database: Database,
    objects: ObjectStore,
    clock: ManualClock,
    whose: Principal,  # noqa: F811
) -> None:
    responses, service = services_of(database)
    made, continued = await begin_conversation(responses, service, whose)
    body = BODY % b""
    assert await responses.keep(whose, response_id(1), "m", continued, [], body, 60_000, has_events=True)
    log = EventLog()
    log.add(b"event: e\ndata: {}\n\n", 1)
    await responses.add_events({response_id(1): log.chunks()})
    await responses.add_events({response_id(1): log.chunks()})  # as after a commit whose answer was lost
    assert await count(database, StoredEvents) == 1
    deleter = TenantDeleter(AuditedStore(database, "root", Role.OWNER, tenant_of, clock), whose.tenant_id, objects)
    await deleter.begin()
    with pytest.raises(RateLimited):
        await service.add_items(whose, made["id"], [message("y")])
    done = await deleter.work(60.0)
    assert done.counts["conversations"] == 1
    for table in (StoredConversation, ConversationItem, StoredEvents):
        assert await count(database, table) == 0

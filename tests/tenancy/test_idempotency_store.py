"""Keys in the database: held once among all gateways, counted exactly, and gone when they expire. On both databases."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from sqlalchemy import func, select
from tests.database_clock import DatabaseClock

from moiety_platform.db.session import Database
from moiety_platform.idempotency.errors import AnswerNotStored, KeyInUse, KeyReused, TooManyKeys
from moiety_platform.idempotency.key_store_client import CLAIM_S, IdempotencyKeys, KeyClaim
from moiety_platform.idempotency.keys import KeyBinding
from moiety_platform.idempotency.limits import AnswerStorageLimits
from moiety_platform.idempotency.models import IdempotencyTenant, IdempotentRequest
from moiety_platform.idempotency.store import KeyStore, StoredAnswer

LIMITS = AnswerStorageLimits(ttl_s=60, max_answer_bytes=100, max_keys_per_tenant=1000, max_bytes_per_tenant=1000)

NewStore = Callable[..., IdempotencyKeys]


@pytest.fixture
def new_store(time: DatabaseClock) -> NewStore:
    """Make a gateway's store of idempotency keys. Nothing renews its claims by itself."""

    def make(database: Database, limits: AnswerStorageLimits = LIMITS) -> IdempotencyKeys:
        return IdempotencyKeys(database, KeyStore(now=time.now), limits)

    return make


def asked(body: bytes = b"body", tenant_id: str = "ten_a") -> KeyBinding:
    return KeyBinding(tenant_id, "prj", None, "/v1/x", body)


async def hold(keys: IdempotencyKeys, key: bytes, what: KeyBinding | None = None) -> KeyClaim:
    claim = await keys.claim(key, what or asked())
    assert isinstance(claim, KeyClaim)
    return claim


async def answer(keys: IdempotencyKeys, key: bytes, data: bytes, what: KeyBinding | None = None) -> None:
    claim = await hold(keys, key, what)
    claim.note(data)
    await claim.keep(200, {"content-type": "text/plain"})
    await claim.release()


async def assert_sums_are_exact(database: Database) -> None:
    """Assert that the sums of each tenant equal those of its rows."""
    tenant_id, size = IdempotentRequest.tenant_id, IdempotentRequest.num_bytes
    actual = func.coalesce(func.length(IdempotentRequest.body), 0)
    async with database.read() as session:
        rows = await session.execute(select(tenant_id, func.count(), func.sum(size)).group_by(tenant_id))
        there = {tenant: (int(keys), int(total)) for tenant, keys, total in rows}
        sums = await session.scalars(select(IdempotencyTenant))
        counted = {one.tenant_id: (one.num_keys, one.num_bytes) for one in sums}
        assert (await session.scalars(select(tenant_id).where(size != actual))).all() == []
    assert there == counted


async def test_one_of_many_concurrent_claims_at_two_gateways_holds_the_key(
    database: Database, second: Database, new_store: NewStore
) -> None:
    stores = [new_store(one) for one in (database, second)] * 10
    found = await asyncio.gather(*(keys.claim(b"k", asked()) for keys in stores), return_exceptions=True)
    assert sum(isinstance(one, KeyClaim) for one in found) == 1
    assert sum(isinstance(one, KeyInUse) for one in found) == len(stores) - 1
    await assert_sums_are_exact(database)


async def test_an_answer_is_kept_until_it_expires(
    database: Database, second: Database, new_store: NewStore, time: DatabaseClock
) -> None:
    here, there = new_store(database), new_store(second)
    await answer(here, b"k", b"hello")
    time.advance(LIMITS.ttl_s - 1)
    assert await there.claim(b"k", asked()) == StoredAnswer(200, {"content-type": "text/plain"}, b"hello")
    with pytest.raises(KeyReused):
        await there.claim(b"k", asked(b"another body"))
    time.advance(1)
    await (await hold(there, b"k", asked(b"another body"))).release()
    await hold(here, b"k")
    await assert_sums_are_exact(database)


async def test_a_claim_is_held_while_it_is_renewed_and_taken_over_when_it_is_not(
    database: Database, second: Database, new_store: NewStore, time: DatabaseClock
) -> None:
    here, there = new_store(database), new_store(second)
    lost = await hold(here, b"k")
    for _ in range(3):
        time.advance(CLAIM_S - 1)
        await here.renew()
        with pytest.raises(KeyInUse):
            await there.claim(b"k", asked())
    time.advance(CLAIM_S)
    taken = await hold(there, b"k")
    await here.renew()
    lost.note(b"late")
    await lost.keep(200, {})  # is not stored over what the other does
    with pytest.raises(KeyInUse):
        await here.claim(b"k", asked())
    taken.note(b"mine")
    await taken.keep(200, {})
    assert await here.claim(b"k", asked()) == StoredAnswer(200, {}, b"mine")
    await assert_sums_are_exact(database)


async def test_a_keeper_that_was_started_renews_its_claims_by_itself(database: Database, second: Database) -> None:
    here, there = (IdempotencyKeys(one, KeyStore(), LIMITS, claim_s=3) for one in (database, second))
    await hold(here, b"k")

    async def expires_ms() -> int:  # by the database's own clock, which nobody moves
        async with database.read() as session:
            return (await session.scalars(select(IdempotentRequest.expires_ms))).one()

    first_ms = await expires_ms()
    await here.start()
    async with asyncio.timeout(60):
        while await expires_ms() <= first_ms:  # noqa: ASYNC110 - the store announces no change
            await asyncio.sleep(0.05)
    with pytest.raises(KeyInUse):
        await there.claim(b"k", asked())
    await here.stop()


async def test_too_many_keys_and_too_many_bytes_are_those_of_one_tenant(
    database: Database, new_store: NewStore
) -> None:
    keys = new_store(database, AnswerStorageLimits(60, 100, 3, 150))
    await answer(keys, b"1", b"x" * 100)
    await answer(keys, b"2", b"x" * 100)  # together more than 150
    await answer(keys, b"3", b"x" * 101)  # more than 100 by itself
    for key in (b"2", b"3"):
        with pytest.raises(AnswerNotStored):
            await keys.claim(key, asked())
    with pytest.raises(TooManyKeys):
        await keys.claim(b"4", asked())
    await answer(keys, b"4", b"x" * 100, asked(tenant_id="ten_b"))
    await assert_sums_are_exact(database)


async def test_expired_keys_are_purged_in_batches_and_others_stay(
    database: Database, new_store: NewStore, time: DatabaseClock
) -> None:
    keys, store = new_store(database), KeyStore(now=time.now)
    for number in range(7):
        await answer(keys, b"%d" % number, b"hello", asked(tenant_id=f"ten_{number % 2}"))
    time.advance(LIMITS.ttl_s)
    await answer(keys, b"stays", b"hello")
    for limit, num_keys in ((5, 5), (5, 2), (5, 0)):
        async with database.write() as session:
            assert await store.purge(session, limit) == num_keys
        await assert_sums_are_exact(database)
    async with database.read() as session:
        assert await session.scalar(select(func.count()).select_from(IdempotentRequest)) == 1
        assert (await session.scalars(select(IdempotencyTenant.tenant_id))).all() == ["ten_a"]


async def test_a_tenants_text_is_erased_on_demand_and_what_runs_leaves_none(
    database: Database, new_store: NewStore
) -> None:
    keys = new_store(database)
    await answer(keys, b"kept", b"hello")
    await answer(keys, b"kept", b"hello", asked(tenant_id="ten_b"))
    running = await hold(keys, b"running")
    async with database.write() as session:
        assert await KeyStore().erase(session, "ten_a") == 2
    running.note(b"late")
    await running.keep(200, {})
    async with database.read() as session:
        assert (await session.scalars(select(IdempotentRequest.tenant_id))).all() == ["ten_b"]
    await assert_sums_are_exact(database)


async def test_sums_stay_exact_whatever_happens_at_once(
    database: Database, second: Database, new_store: NewStore, time: DatabaseClock
) -> None:
    rng = random.Random(8)
    stores = [new_store(one, AnswerStorageLimits(2, 100, 1000, 300)) for one in (database, second)]

    async def one_request(number: int) -> None:
        keys, key, tenant = stores[number % 2], b"%d" % rng.randrange(6), f"ten_{rng.randrange(3)}"
        try:
            found = await keys.claim(key, asked(tenant_id=tenant))
        except (KeyInUse, AnswerNotStored):
            return
        if isinstance(found, KeyClaim):
            time.advance(rng.choice([0, 0, 1]))
            found.note(b"x" * rng.randrange(120))
            if rng.random() < 0.7:
                await found.keep(200, {})
            await found.release()

    async def purge(there: Database) -> None:
        async with there.write() as session:
            await KeyStore(now=time.now).purge(session)

    for _ in range(3):
        await asyncio.gather(*map(one_request, range(16)), purge(database), purge(second))
        await assert_sums_are_exact(database)

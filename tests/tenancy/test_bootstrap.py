"""The first start creates the first tenant and keys."""

from __future__ import annotations

import asyncio

import sqlalchemy as sa

from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.bootstrap import ensure_bootstrap
from moiety_platform.auth.service import revoke_key
from moiety_platform.classes.schemas import ClassChange
from moiety_platform.classes.service import change_class, load_classes
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.tenants.models import ApiKey, Project, Tenant
from moiety_wire.classes import BATCH, CPU_SLOS, FLEX

from .conftest import PEPPER, Demo


async def count(database: Database, model: type) -> int:
    async with database.read() as session:
        return await session.scalar(sa.select(sa.func.count()).select_from(model)) or 0


async def test_the_first_run_makes_an_administrator_and_a_demo_tenant_whose_keys_work(
    database: Database, clock: ManualClock
) -> None:
    made = await ensure_bootstrap(database, PEPPER, clock)
    assert made is not None
    authenticator = Authenticator(database, PEPPER, clock)
    assert (await authenticator.authenticate(f"Bearer {made.admin_key}")).scopes == {"admin"}
    tenant = await authenticator.authenticate(f"Bearer {made.tenant_key}")
    assert (tenant.tenant_name, tenant.tenant_id, tenant.scopes) == ("demo", made.tenant_id, {"inference"})
    assert made.admin_key not in repr(made)
    assert made.tenant_key not in repr(made)


async def test_the_first_run_gives_the_built_in_classes_slos_of_cpus_and_a_later_one_changes_no_class(
    database: Database, clock: ManualClock
) -> None:
    await ensure_bootstrap(database, PEPPER, clock, slos=CPU_SLOS)
    async with database.write() as session:
        classes = await load_classes(session)
        assert [classes["priority"].service, classes["standard"].service] == list(CPU_SLOS)
        assert [classes["flex"].service, classes["batch"].service] == [FLEX, BATCH]
        await change_class(session, "standard", ClassChange(ttft_s=3.0))
    await ensure_bootstrap(database, PEPPER, clock, reissue=True, slos=CPU_SLOS)
    async with database.read() as session:
        assert (await load_classes(session))["standard"].service.ttft_s == 3.0


async def test_later_runs_make_nothing_even_after_everything_was_revoked(
    database: Database, clock: ManualClock
) -> None:
    await ensure_bootstrap(database, PEPPER, clock)
    async with database.write() as session:
        for key in await session.scalars(sa.select(ApiKey).where(ApiKey.project_id.is_not(None))):
            await revoke_key(session, key.id, clock.now())
    assert await ensure_bootstrap(database, PEPPER, clock) is None
    assert (await count(database, Tenant), await count(database, Project), await count(database, ApiKey)) == (1, 1, 2)


async def test_a_store_that_is_in_use_gets_no_demo_tenant(database: Database, clock: ManualClock, demo: Demo) -> None:
    assert await ensure_bootstrap(database, PEPPER, clock) is None
    assert await count(database, Tenant) == 1


async def test_exactly_one_of_several_concurrent_first_runs_creates_keys(database_url: str, clock: ManualClock) -> None:
    stores = [Database.open(database_url) for _ in range(4)]
    made = await asyncio.gather(*(ensure_bootstrap(store, PEPPER, clock) for store in stores))
    assert sum(result is not None for result in made) == 1
    assert (await count(stores[0], Tenant), await count(stores[0], ApiKey)) == (1, 2)
    for store in stores:
        await store.close()


async def test_lost_first_keys_are_made_anew_beside_the_old_ones(database: Database, clock: ManualClock) -> None:
    first = await ensure_bootstrap(database, PEPPER, clock)
    again = await ensure_bootstrap(database, PEPPER, clock, reissue=True)
    assert first is not None
    assert again is not None
    assert again.tenant_id == first.tenant_id
    authenticator = Authenticator(database, PEPPER, clock)
    for key in (first.admin_key, first.tenant_key, again.admin_key, again.tenant_key):
        await authenticator.authenticate(f"Bearer {key}")
    assert await count(database, Tenant) == 1

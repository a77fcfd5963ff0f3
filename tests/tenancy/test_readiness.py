"""Readiness of the store: it requires the current schema and survives an outage."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import select

from moiety_migrations import upgrade
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.keys import generate_key
from moiety_platform.clock import ManualClock
from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.usage.models import UsageRecord

from .conftest import PEPPER, CuttableStore


async def test_a_store_is_ready_once_it_is_migrated_and_says_before_what_to_do(
    empty_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    database = Database.open(empty_url)
    store = StoreReadiness(database)
    assert "moiety migrate upgrade" in await settled(store)
    assert "moiety migrate upgrade" in await settled(store)
    assert capsys.readouterr().out.count("store_not_ready") == 1
    await asyncio.to_thread(upgrade, empty_url)
    async with asyncio.timeout(60):
        while await settled(store):  # by a look that began before, or in which a busy database did not answer
            pass
    await database.close()


async def test_a_store_that_was_ready_stays_so_during_an_outage(cuttable: CuttableStore) -> None:
    before, after = StoreReadiness(cuttable.database), StoreReadiness(cuttable.database)
    assert await settled(before) == ""
    await cuttable.wire.cut()
    assert await settled(before) == ""
    assert "cannot be reached" in await settled(after)
    await cuttable.wire.mend()
    async with asyncio.timeout(60):
        while await settled(after):  # what was said last, until another look has ended
            pass


async def test_missing_tables_are_told_from_a_store_that_is_away(empty_url: str) -> None:
    database = Database.open(empty_url)
    with pytest.raises(Unavailable, match="moiety migrate upgrade") as caught:
        async with database.read() as session:
            await session.execute(select(UsageRecord))
    assert caught.value.code == "store_unmigrated"
    await database.close()


async def test_keys_that_cannot_be_checked_are_logged_once_with_the_cause(
    empty_url: str, clock: ManualClock, capsys: pytest.CaptureFixture[str]
) -> None:
    database = Database.open(empty_url)
    authenticator = Authenticator(database, PEPPER, clock)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await authenticator.authenticate(f"Bearer {generate_key().text}")
        clock.advance(1.0)
    said = capsys.readouterr().out
    assert said.count("key_store_unreachable") == 1
    assert "moiety migrate upgrade" in said
    await database.close()


async def settled(store: StoreReadiness) -> str:
    """Return why the store is not ready, after its first check; empty if it is ready."""
    async with asyncio.timeout(60):
        while (reason := await store.why_not_ready()) == "the database does not answer yet":
            pass
    return reason

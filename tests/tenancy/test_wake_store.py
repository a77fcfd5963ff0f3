"""Waiting requests, the lease and wake times in the database, on both databases."""

from __future__ import annotations

import asyncio

from sqlalchemy import update

from moiety_platform.db.session import Database
from moiety_platform.wake_on_request.models import WakeDemand, WakeLease, WakeSwitch
from moiety_platform.wake_on_request.plan import ModelDemand
from moiety_platform.wake_on_request.store import (
    WakeKind,
    claim_lease,
    end_switches,
    note_time,
    put_demands,
    put_switches,
    read_demands,
    read_switches,
    read_times,
    release_lease,
)

TTL_MS = 60_000


async def test_demands_of_all_gateways_are_summed_with_the_earliest_slo_and_replaced(database: Database) -> None:
    async with database.write() as session:
        await put_demands(session, "one", [ModelDemand("a", 2, 5.0, 7.0), ModelDemand("b", 1, 9.0)], TTL_MS)
        await put_demands(session, "two", [ModelDemand("a", 3, -1.0, 3.0)], TTL_MS)
        first, second = await read_demands(session)
    assert (first.model, first.num_waiting, second.model, second.num_waiting) == ("a", 5, "b", 1)
    assert 7 <= first.waited_s < 9 and 0 <= second.waited_s < 2, "since the first gateway needs it"
    assert -2 < first.slack_s <= -1 and 8 < second.slack_s <= 9
    async with database.write() as session:
        await put_demands(session, "one", [ModelDemand("a", 7, 5.0)], TTL_MS)
        assert [(one.model, one.num_waiting) for one in await read_demands(session)] == [("a", 10)]
        await put_demands(session, "one", [], TTL_MS)
        assert [(one.model, one.num_waiting) for one in await read_demands(session)] == [("a", 3)]


async def test_demands_of_a_killed_gateway_expire(database: Database) -> None:
    async with database.write() as session:
        await put_demands(session, "killed", [ModelDemand("a", 2, 5.0)], TTL_MS)
        await session.execute(update(WakeDemand).values(expires_ms=1))
    async with database.write() as session:
        assert await read_demands(session) == []


async def test_one_of_several_gateways_holds_the_lease_until_it_expires_or_is_released(
    database: Database, second: Database
) -> None:
    async def claim(opened: Database, owner: str) -> bool:
        async with opened.write() as session:
            return await claim_lease(session, owner, TTL_MS)

    claimed = await asyncio.gather(*(claim(one, owner) for one, owner in ((database, "one"), (second, "two")) * 3))
    assert claimed.count(True) == 3, "one gateway, each time it asked"
    holder, other = ("one", "two") if claimed[0] else ("two", "one")
    assert await claim(database, holder) and not await claim(database, other)
    async with database.write() as session:
        await release_lease(session, holder)
    assert await claim(database, other) and not await claim(database, holder)
    async with database.write() as session:
        await session.execute(update(WakeLease).values(expires_ms=1))
    assert await claim(database, holder)


async def test_measured_times_are_averaged_by_model_and_kind(database: Database) -> None:
    async with database.write() as session:
        await note_time(session, "a", WakeKind.WAKE, 2.0)
        await note_time(session, "a", WakeKind.START, 60.0)
        await note_time(session, "a", WakeKind.WAKE, 4.0)
    async with database.read() as session:
        assert await read_times(session) == {WakeKind.WAKE: {"a": 3.0}, WakeKind.START: {"a": 60.0}}


async def test_switches_are_kept_until_they_end(database: Database) -> None:
    async with database.write() as session:
        await put_switches(session, {"tcp://b:1": "a", "tcp://c:1": "a", "tcp://d:1": "a"})
        await put_switches(session, {"tcp://c:1": "b"})
        await end_switches(session, ["tcp://b:1"], ["tcp://c:1", "tcp://d:1"])
    async with database.write() as session:
        assert await read_switches(session) == {"tcp://c:1": "b", "tcp://d:1": "a"}, "their commands are under way"
        await session.execute(update(WakeSwitch).where(WakeSwitch.address == "tcp://d:1").values(at_ms=1))
        await end_switches(session, [], ["tcp://c:1", "tcp://d:1"])
        assert await read_switches(session) == {"tcp://c:1": "b"}, "the other engine has followed, and is awake again"

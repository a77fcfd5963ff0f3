"""Service classes in the store, on both databases, and as each gateway sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.classes.cache import ClassCache
from moiety_platform.classes.schemas import ClassChange, NewClass
from moiety_platform.classes.service import MAX_CLASSES, change_class, create_class, load_classes
from moiety_platform.classes.terms import Catalogue, ClassTerms
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import Conflict, Unavailable
from moiety_wire.classes import BATCH, FLEX, PRIORITY, SHIPPED, STANDARD, OverloadAction

from .conftest import Admin, CuttableStore, Demo

GOLD = {"name": "gold", "rank": 0, "ttft_s": 0.25, "tpot_s": 0.02, "price_factor": 2.0, "credit_percent": 25}


async def read(database: Database) -> Catalogue:
    async with database.read() as session:
        return await load_classes(session)


async def test_a_migrated_store_has_the_classes_that_are_shipped(database: Database) -> None:
    found = await read(database)
    assert [terms.service for terms in found.values()] == list(SHIPPED)
    assert [terms.price_factor for terms in found.values()] == [1.0, 1.0, 0.5, 0.5]
    assert [terms.downgrade_to for terms in found.values()] == [None] * 4


async def test_a_class_is_made_shown_changed_and_deleted(admin: Admin) -> None:
    made = await admin.call("POST", "classes", 201, json=GOLD)
    assert (made["shipped"], made["weight"], made["preemptible"], made["on_overload"]) == (False, 1.0, True, "reject")
    assert await admin.call("GET", "classes/gold", 200) == made
    change = {"weight": 3, "tpot_s": None, "on_overload": "downgrade", "downgrade_to": "standard"}
    assert await admin.call("PATCH", "classes/gold", 200, json=change) == made | change
    listed = (await admin.call("GET", "classes", 200))["data"]
    assert [one["name"] for one in listed] == ["gold", "priority", "standard", "flex", "batch"]
    assert (await admin.call("DELETE", "classes/gold", 200))["name"] == "gold"
    assert (await admin.call("GET", "classes/gold", 404))["error"]["code"] == "not_found"


async def test_a_shipped_class_can_be_changed_but_not_deleted(admin: Admin) -> None:
    assert (await admin.call("PATCH", "classes/priority", 200, json={"ttft_s": 0.3}))["ttft_s"] == 0.3
    refused = await admin.call("DELETE", "classes/priority", 409)
    assert refused["error"]["code"] == "class_shipped"
    assert "change it instead" in refused["error"]["message"]


async def test_a_class_in_use_cannot_be_deleted(admin: Admin, demo: Demo) -> None:
    await admin.call("POST", "classes", 201, json=GOLD)
    await admin.call("PATCH", f"tenants/{demo.tenant_id}", 200, json={"service_class": "gold"})
    refused = (await admin.call("DELETE", "classes/gold", 409))["error"]
    assert refused["code"] == "class_in_use"
    assert "moiety tenant change" in refused["message"]
    await admin.call("PATCH", f"tenants/{demo.tenant_id}", 200, json={"service_class": "standard"})
    await admin.call("POST", "classes", 201, json={"name": "silver", "rank": 1, "ttft_s": 1.0})
    falls_back = {"on_overload": "downgrade", "downgrade_to": "silver"}
    await admin.call("PATCH", "classes/gold", 200, json=falls_back)
    refused = (await admin.call("DELETE", "classes/silver", 409))["error"]
    assert "gold falls back to 'silver'" in refused["message"]
    await admin.call("DELETE", "classes/gold", 200)
    await admin.call("DELETE", "classes/silver", 200)


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"rank": -1}, "rank", "from 0 (highest) to 1000"),
        ({"weight": 0}, "weight", "from 0.001 to 1000"),
        ({"ttft_s": 0}, "ttft_s", "from 0.001"),
        ({"ttft_s": None}, None, "a class needs ttft_s"),
        ({"max_queue_s": 1e12}, "max_queue_s", "must be a number from"),
        ({"ttft_per_1k_s": -0.1}, "ttft_per_1k_s", "from 0 to"),
        ({"price_factor": -1}, "price_factor", "from 0 to 100"),
        ({"credit_percent": 101}, "credit_percent", "from 0 to 100"),
        ({"on_overload": "explode"}, "on_overload", "one of: reject, queue, downgrade"),
        ({"on_overload": "downgrade"}, "downgrade_to", "choose one of: batch, flex"),
        ({"downgrade_to": "priority"}, "downgrade_to", "choose one of: batch, flex"),
        ({"downgrade_to": "standard"}, "downgrade_to", "choose one of: batch, flex"),
        ({"downgrade_to": "nowhere"}, "downgrade_to", "choose one of: batch, flex"),
        ({"preemptible": "yes"}, "preemptible", "got `str`"),
        ({"colour": "red"}, None, "colour"),
    ],
)
async def test_a_class_that_makes_no_sense_is_refused_with_what_would(
    admin: Admin,
    database: Database,
    change: dict[str, Any],
    param: str | None,
    says: str,
) -> None:
    refused = (await admin.call("PATCH", "classes/standard", 400, json=change))["error"]
    assert refused["param"] == param
    assert says in refused["message"]
    assert (await read(database))["standard"] == ClassTerms(STANDARD)


@pytest.mark.parametrize("name", ["", "Gold", "2nd", "a" * 33, "a b", "ä", "a\n"])
async def test_a_name_that_no_header_or_metric_could_carry_is_refused(admin: Admin, name: str) -> None:
    refused = (await admin.call("POST", "classes", 400, json=GOLD | {"name": name}))["error"]
    assert (refused["param"], "such as 'gold-2'" in refused["message"]) == ("name", True)


async def test_a_taken_name_is_a_conflict_and_so_is_one_class_too_many(database: Database, admin: Admin) -> None:
    refused = (await admin.call("POST", "classes", 409, json=GOLD | {"name": "flex"}))["error"]
    assert "change it, or choose another name" in refused["message"]
    async with database.write() as session:
        for number in range(MAX_CLASSES - len(SHIPPED)):
            await create_class(session, NewClass(name=f"c{number}", rank=5, completion_s=1.0))
    with pytest.raises(Conflict, match="delete one"):
        async with database.write() as session:
            await create_class(session, NewClass(name="more", rank=5, completion_s=1.0))


async def test_a_rank_cannot_pass_that_of_the_class_which_falls_back_to_it(admin: Admin) -> None:
    await admin.call("PATCH", "classes/standard", 200, json={"on_overload": "downgrade", "downgrade_to": "flex"})
    refused = (await admin.call("PATCH", "classes/flex", 400, json={"rank": 1}))["error"]
    assert "its rank must stay above 1" in refused["message"]
    refused = (await admin.call("PATCH", "classes/standard", 400, json={"rank": 2}))["error"]
    assert refused["param"] == "downgrade_to"


async def test_edits_at_the_same_time_never_make_a_circle(database: Database) -> None:
    """Each edit alone is allowed; the second one must see the first."""
    async with database.write() as session:
        await create_class(session, NewClass(name="a", rank=10, completion_s=1.0))
        await create_class(session, NewClass(name="b", rank=11, completion_s=1.0))

    async def change(name: str, **fields: Any) -> None:
        async with database.write() as session:
            await change_class(session, name, ClassChange(**fields))

    results = await asyncio.gather(
        change("a", on_overload="downgrade", downgrade_to="b"), change("a", rank=12), return_exceptions=True
    )
    assert any(isinstance(result, Exception) for result in results)
    found = await read(database)
    target = found["a"].downgrade_to
    assert target is None or found[target].service.rank > found["a"].service.rank


# ── as a gateway sees them ──


async def edit(database: Database, **fields: Any) -> None:
    async with database.write() as session:
        await change_class(session, "standard", ClassChange(**fields))


async def test_an_edit_reaches_every_gateway_within_seconds_and_its_own_at_once(database: Database) -> None:
    clock = ManualClock()
    here, there = ClassCache(database, clock), ClassCache(database, clock)
    for cache in (here, there):
        assert (await cache.current())["standard"].service == STANDARD
    await edit(database, ttft_s=0.7)
    here.forget()
    assert (await here.current())["standard"].service.ttft_s == 0.7
    assert (await there.current())["standard"].service.ttft_s == 2.0
    clock.advance(2.0)
    assert (await there.current())["standard"].service.ttft_s == 0.7


async def test_a_class_that_another_gateway_has_just_made_is_found(database: Database) -> None:
    cache = ClassCache(database, ManualClock())
    await cache.current()
    async with database.write() as session:
        await create_class(session, NewClass(name="gold", rank=0, ttft_s=0.2))
    assert (await cache.find("gold"))["gold"].service.ttft_s == 0.2
    with pytest.raises(Unavailable, match="'nowhere' cannot be read"):
        await cache.find("nowhere")


async def test_many_requests_cost_one_statement_in_the_time_that_a_snapshot_is_good_for(database: Database) -> None:
    statements: list[str] = []
    sa.event.listen(database.engine.sync_engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    clock = ManualClock()
    cache = ClassCache(database, clock)
    for _ in range(3):
        await asyncio.gather(*(cache.current() for _ in range(50)))
        clock.advance(1.4)

    def looked_up() -> int:
        return sum("service_classes" in statement for statement in statements)

    async with asyncio.timeout(60):  # the gateway waits for a slow database in the background
        while looked_up() < 2:  # noqa: ASYNC110 - a listener of the database counts
            await asyncio.sleep(0.01)
    assert looked_up() == 2


async def test_an_edit_during_a_look_up_is_not_missed(database: Database) -> None:
    cache = ClassCache(database, ManualClock())
    reading = asyncio.create_task(cache.current())
    await asyncio.sleep(0)  # it has begun, perhaps before the edit
    await edit(database, ttft_s=0.7)
    cache.forget()
    assert (await cache.current())["standard"].service.ttft_s == 0.7
    await reading
    assert (await cache.current())["standard"].service.ttft_s == 0.7


async def test_without_a_database_the_last_classes_stay_good_and_without_any_it_fails_closed(
    cuttable: CuttableStore,
) -> None:
    clock = ManualClock()
    cache = ClassCache(cuttable.database, clock)
    await cache.current()
    await cuttable.wire.cut()
    clock.advance(3600)
    assert (await cache.current())["standard"].service == STANDARD
    with pytest.raises(Unavailable) as caught:
        await ClassCache(cuttable.database, clock).current()
    assert caught.value.retry_after_s is not None
    await cuttable.wire.mend()
    await edit(cuttable.steady, ttft_s=0.7)
    await until_read(cache, clock)


async def until_read(cache: ClassCache, clock: ManualClock) -> None:
    """Ask for the classes until the edit is seen."""
    async with asyncio.timeout(60):
        while (await cache.current())["standard"].service.ttft_s != 0.7:
            clock.advance(1.0)
            await asyncio.sleep(0.01)


async def test_a_database_that_does_not_answer_holds_up_nobody_who_has_classes_already(cuttable: CuttableStore) -> None:
    clock = ManualClock()
    cache = ClassCache(cuttable.database, clock)
    await cache.current()
    cuttable.wire.stall()
    clock.advance(1.9)
    assert (await cache.current())["standard"].service == STANDARD  # and is being read, ahead of need
    clock.advance(1.0)
    for _ in range(200):
        assert (await cache.current())["standard"].service == STANDARD
    await edit(cuttable.steady, ttft_s=0.7)
    cuttable.wire.resume()
    await until_read(cache, clock)


# ── the choice ──

ranks = st.integers(0, 5)


@given(cap=st.sampled_from(["priority", "standard", "flex", "batch", "own"]), own=ranks, tier=st.sampled_from(
    [None, "auto", "default", "flex", "priority"]
))  # fmt: skip
def test_no_tier_ever_gets_a_better_class_than_the_tenants(cap: str, own: int, tier: str | None) -> None:
    service = msgspec.structs.replace(STANDARD, name="own", rank=own)
    catalogue = Catalogue({one.name: ClassTerms(one) for one in (*SHIPPED, service)})
    chosen = catalogue.choose(cap, tier)
    assert chosen.service.rank >= catalogue[cap].service.rank
    assert tier not in (None, "auto") or chosen.service.name == cap


def test_a_fallback_is_given_along_only_where_the_class_downgrades() -> None:
    falls_back = msgspec.structs.replace(STANDARD, on_overload=OverloadAction.DOWNGRADE)
    terms = {one.name: ClassTerms(one) for one in (PRIORITY, FLEX, BATCH)}
    idle = Catalogue({**terms, "standard": ClassTerms(STANDARD, downgrade_to="flex")})
    live = Catalogue({**terms, "standard": ClassTerms(falls_back, downgrade_to="flex")})
    assert idle.choose("standard", None).fallback is None
    chosen = live.choose("standard", None)
    assert chosen.fallback == FLEX
    assert (chosen.served("flex"), chosen.served("standard"), chosen.served("")) == (FLEX, falls_back, falls_back)

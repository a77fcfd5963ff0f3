"""Spot classes over HTTP: the price of a request, its headers, and its cost in the books."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import select

from moiety_platform.clock import ManualClock
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import Unavailable
from moiety_platform.spot.pricing import idle_capacity, spot_percent
from moiety_platform.spot.service import FAILURE_PAUSE_S, SpotMetrics, SpotPrices
from moiety_platform.usage.billing_context import decode_bill
from moiety_wire.engine_load import ClassLoad, Load, StepCosts

from .conftest import NewCard, RunningGateway, StartGateway
from .test_quotas import limit, used

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
SPOT_CHAT = CHAT | {"service_tier": "spot"}
PATH = "/v1/chat/completions"
PROMPT_TOKENS = RunningGateway.prompt_tokens("hi")
SPOT = {
    "name": "spot", "rank": 9, "completion_s": 3600, "on_overload": "queue", "spot_floor_percent": 20,
    "spot_ceiling_percent": 90,
}  # fmt: skip
EMPTY = Load(
    num_running=0, num_waiting=0, num_paused=0, kv_blocks_total=100, kv_blocks_used=0, kv_blocks_cached=0,
    block_size=16, steps_total=0, prompt_tokens_total=0, cached_tokens_total=0, output_tokens_total=0,
    requests_total=0, max_running=10, engine_id="e", seq=1,
)  # fmt: skip


def waiting(predicted_ttft_s: float) -> ClassLoad:
    return ClassLoad("spot", 0, 0, predicted_ttft_s, 0, {}, 0, {}, 0, 0, 0)


@pytest.fixture
def engine(new_card: NewCard) -> FakeEngineClient:
    made = FakeEngineClient(msgspec.structs.replace(new_card("engine-1", "tiny"), serves_spot=True))
    made.step_costs = StepCosts(0.0, 0.0, (), 0.0, 0.0, 0.0)
    return made


@pytest.fixture
async def gateway(start_gateway: StartGateway, engine: FakeEngineClient) -> AsyncIterator[RunningGateway]:
    async with start_gateway([engine], stores_usage=True) as running:
        await running.admin("PUT", "/prices", {"model": "tiny", "input": "1", "output": "2"})
        await running.admin("POST", "/classes", SPOT, 201)
        yield running


async def send(gateway: RunningGateway, body: dict[str, Any] = SPOT_CHAT, **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, found, answer = await gateway.post(PATH, body, headers=named)
    return status, found, json.loads(answer)


async def stored(gateway: RunningGateway) -> list[dict[str, Any]]:
    await gateway.stored_usage.flush()
    rows: list[dict[str, Any]] = (await gateway.admin("GET", "/usage/requests"))["data"]
    return rows


@pytest.mark.parametrize(
    ("change", "idle"),
    [
        ({}, 1.0),
        ({"num_running": 5}, 0.5),
        ({"kv_blocks_used": 75}, 0.25),
        ({"num_running": 20}, 0.0),
        ({"classes": [waiting(10.0)]}, 0.5),
        ({"num_running": 5, "classes": [waiting(30.0)]}, 0.125),
        ({"step_costs": StepCosts(10.0, 0.0, (), 0.0, 0.0, 0.0)}, 0.5),
    ],
)
def test_idle_capacity_is_what_slots_blocks_and_the_predicted_wait_leave(change: dict[str, Any], idle: float) -> None:
    assert idle_capacity([msgspec.structs.replace(EMPTY, **change)], "spot") == pytest.approx(idle)


def test_idle_capacity_is_the_mean_over_the_engines() -> None:
    busy = msgspec.structs.replace(EMPTY, num_running=10)
    assert idle_capacity([EMPTY, busy], "spot") == 0.5
    assert idle_capacity([], "spot") is None


@pytest.mark.parametrize(("idle", "percent"), [(1.0, 20), (0.0, 90), (0.5, 55), (0.999, 21), (2.0, 20), (-1.0, 90)])
def test_the_price_follows_idle_capacity_within_its_bounds(idle: float, percent: int) -> None:
    assert spot_percent(idle, 20, 90) == percent


async def test_a_spot_request_pays_the_published_price_and_says_so(
    gateway: RunningGateway, engine: FakeEngineClient
) -> None:
    status, headers, answer = await send(gateway)
    assert status == 200
    assert headers["x-moiety-class"] == "spot" and answer["service_tier"] == "spot"
    price = headers["x-moiety-spot-price"]
    assert price.startswith('percent=20, input-usd="0.2", cached-input-usd="0.2", output-usd="0.4", until="20')
    (row,) = await stored(gateway)
    output = answer["usage"]["completion_tokens"]
    assert row["cost_nanodollars"] == PROMPT_TOKENS * 200 + output * 400
    assert row["spot_percent"] == 20
    submit = engine.submits[0]
    assert (submit.service.name, submit.service.spot, submit.fallback) == ("spot", True, None)
    bill = decode_bill(submit.billing_context)  # which bills the request after a kill of the gateway
    assert bill.cost("spot", PROMPT_TOKENS, 0, output) == row["cost_nanodollars"]
    assert (bill.row.spot_percent, list(bill.prices)) == (20, ["spot"])
    assert (await gateway.admin("GET", "/usage/reconciliation"))["agrees"]


async def test_another_class_has_no_spot_price(gateway: RunningGateway, engine: FakeEngineClient) -> None:
    status, headers, _ = await send(gateway, CHAT)
    assert status == 200 and "x-moiety-spot-price" not in headers
    assert (await stored(gateway))[0]["spot_percent"] is None
    assert not engine.submits[0].service.spot
    assert (await gateway.admin("GET", "/spot-prices"))["data"] == []


async def test_a_price_holds_for_its_interval_whatever_the_load_and_changes_with_the_next(
    start_gateway: StartGateway, engine: FakeEngineClient
) -> None:
    async with start_gateway([engine], stores_usage=True, spot_interval_s=3600) as gateway:
        await gateway.admin("PUT", "/prices", {"model": "tiny", "input": "1", "output": "2"})
        await gateway.admin("POST", "/classes", SPOT, 201)
        _, before, _ = await send(gateway)
        engine.class_loads = [waiting(1e9)]
        _, same, _ = await send(gateway)
        assert same["x-moiety-spot-price"] == before["x-moiety-spot-price"]
        gateway.store_clock.ahead_ms += 3_600_000
        gateway.assembled.services.spot.forget()
        _, after, _ = await send(gateway)
        assert after["x-moiety-spot-price"].startswith("percent=90, ")
        newest, oldest = (
            await gateway.admin("GET", "/spot-prices?since=2020-01-01T00:00:00Z&until=2999-01-01T00:00:00Z")
        )["data"]
        assert (newest["percent"], newest["idle_percent"]) == (90, 0)
        assert (oldest["percent"], oldest["idle_percent"]) == (20, 100)
        assert oldest["ends_at"] == newest["starts_at"]


async def test_a_longer_interval_continues_where_the_last_price_ended(
    start_gateway: StartGateway, engine: FakeEngineClient
) -> None:
    async with start_gateway([engine], stores_usage=True, spot_interval_s=60) as gateway:
        await gateway.admin("POST", "/classes", SPOT, 201)
        spot = gateway.assembled.services.spot
        async with spot.database.read() as session:
            now_ms = await session.scalar(select(spot.now()))
        gateway.store_clock.ahead_ms += 300_000 - now_ms % 300_000 + 1000  # just after a boundary of both lengths
        assert (await send(gateway))[0] == 200
        spot.interval_s = 300
        for _ in range(5):
            gateway.store_clock.ahead_ms += 60_000
            spot.forget()
            status, _, answer = await send(gateway)
            assert status == 200, answer
        listed = await gateway.admin("GET", "/spot-prices?since=2020-01-01T00:00:00Z&until=2999-01-01T00:00:00Z")
        newest, longer, first = listed["data"]
        assert (first["ends_at"], longer["ends_at"]) == (longer["starts_at"], newest["starts_at"])
        lengths = [
            (datetime.fromisoformat(one["ends_at"]) - datetime.fromisoformat(one["starts_at"])).total_seconds()
            for one in (first, longer, newest)
        ]
        assert lengths == [60, 240, 300]


class StoreOutage:
    """A store whose every connection times out after a while."""

    def __init__(self) -> None:
        self.num_asked = 0

    @asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        self.num_asked += 1
        await asyncio.sleep(0)
        raise Unavailable("The store is down.", code="store_unavailable")
        yield


async def test_in_an_outage_requests_share_one_time_out_a_model() -> None:
    store, clock = StoreOutage(), ManualClock()
    made = SpotPrices(cast(Any, store), lambda: [], clock, SpotMetrics(CollectorRegistry()), 60)
    terms = cast(Any, SimpleNamespace(service=SimpleNamespace(name="spot"), spot=(20, 90)))

    async def ask() -> list[Any]:
        return await asyncio.gather(*(made.price_of(terms, f"m{n % 3}") for n in range(20)), return_exceptions=True)

    assert {(type(one), one.code) for one in await ask()} == {(Unavailable, "store_unavailable")}
    assert store.num_asked == 3, "the models ask at the same time, each once"
    await ask()
    assert store.num_asked == 3
    clock.advance(FAILURE_PAUSE_S)
    await ask()
    assert store.num_asked == 6


async def test_gateways_of_one_database_agree_on_the_price(gateway: RunningGateway, engine: FakeEngineClient) -> None:
    """The second gateway sees another load, and takes the price that the first one published."""
    spot = gateway.assembled.services.spot
    await send(gateway)
    engine.class_loads = [waiting(1e9)]
    spot.forget()
    _, headers, _ = await send(gateway)
    assert headers["x-moiety-spot-price"].startswith("percent=20, ")
    assert len((await gateway.admin("GET", "/spot-prices"))["data"]) == 1


async def test_concurrent_requests_publish_one_price(gateway: RunningGateway) -> None:
    answers = await asyncio.gather(*(send(gateway) for _ in range(8)))
    assert len({headers["x-moiety-spot-price"] for _, headers, _ in answers}) == 1


async def test_a_client_can_set_the_highest_price(gateway: RunningGateway, engine: FakeEngineClient) -> None:
    status, _, _ = await send(gateway, x_moiety_spot_max_percent="20")
    assert status == 200
    status, _, answer = await send(gateway, x_moiety_spot_max_percent="19")
    assert (status, answer["error"]["code"]) == (409, "spot_price_too_high")
    assert "20 %" in answer["error"]["message"]
    for wrong in ("0", "101", "cheap", "99999999999999999999", "0001" + "9" * 4400):
        status, _, answer = await send(gateway, x_moiety_spot_max_percent=wrong)
        assert (status, answer["error"]["code"]) == (400, "invalid_spot_limit"), wrong
    assert len(engine.submits) == 1


async def test_quotas_in_money_are_reserved_at_the_spot_price(gateway: RunningGateway) -> None:
    cost = PROMPT_TOKENS * 200 + 4 * 400
    quota = await limit(gateway, "tenant", cost, "money_per_day")
    status, _, _ = await send(gateway)
    assert status == 200
    (row,) = await stored(gateway)
    assert await used(gateway, quota) == row["cost_nanodollars"] <= cost
    status, _, answer = await send(gateway, CHAT)
    assert (status, answer["error"]["code"]) == (429, "request_exceeds_quota"), "the whole price is above what is left"


async def test_a_quote_offers_the_spot_price_without_a_guarantee_and_binds_it(
    gateway: RunningGateway, engine: FakeEngineClient
) -> None:
    _, _, answer = await gateway.post("/v1/quote", CHAT)
    spot = next(one for one in json.loads(answer)["data"] if one["service_class"] == "spot")
    assert (spot["spot_percent"], spot["guarantee"], spot["service_tier"]) == (20, None, "spot")
    assert spot["price"]["max_nanodollars"] == PROMPT_TOKENS * 200 + 4 * 400
    await gateway.admin("PUT", "/prices", {"model": "tiny", "input": "100", "output": "200"})
    status, headers, _ = await send(gateway, CHAT, x_moiety_quote=spot["quote"])
    assert (status, headers["x-moiety-class"]) == (200, "spot")
    (row,) = await stored(gateway)
    assert (row["cost_nanodollars"], row["spot_percent"]) == (spot["price"]["max_nanodollars"], 20)


async def test_spot_prices_are_listed_for_the_models_that_a_key_may_use(
    gateway: RunningGateway, engine: FakeEngineClient
) -> None:
    status, _, answer = await gateway.request("GET", "/v1/spot-prices")
    (offer,) = json.loads(answer)["data"]
    assert status == 200
    assert (offer["model"], offer["service_class"], offer["percent"]) == ("tiny", "spot", 20)
    assert (offer["floor_percent"], offer["ceiling_percent"], offer["idle_percent"]) == (20, 90, 100)
    assert offer["price"] == {
        "input_nanodollars": 2 * 10**8, "cached_input_nanodollars": 2 * 10**8, "output_nanodollars": 4 * 10**8,
    }  # fmt: skip
    engine.load_age_s = 60.0
    gateway.assembled.services.spot.forget()
    gateway.store_clock.ahead_ms += 3_600_000
    _, _, answer = await gateway.request("GET", "/v1/spot-prices")
    assert json.loads(answer)["data"] == [], "the load is unknown"


async def test_without_a_load_or_with_another_policy_a_spot_request_is_refused(
    start_gateway: StartGateway, engine: FakeEngineClient, new_card: NewCard
) -> None:
    other = FakeEngineClient(new_card("engine-2", "plain"))
    async with start_gateway([engine, other]) as gateway:
        status, _, answer = await send(gateway)
        assert (status, answer["error"]["code"]) == (400, "no_spot_class")
        await gateway.admin("POST", "/classes", SPOT, 201)
        status, _, answer = await send(gateway, SPOT_CHAT | {"model": "plain"})
        assert (status, answer["error"]["code"]) == (400, "spot_not_supported")
        engine.load_age_s = 60.0
        status, _, answer = await send(gateway)
        assert (status, answer["error"]["code"]) == (503, "spot_price_unavailable")
        engine.load_age_s = 0.0
        status, _, _ = await send(gateway)
        assert status == 200


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"spot_ceiling_percent": None}, "spot_ceiling_percent"),
        ({"spot_floor_percent": None}, "spot_floor_percent"),
        ({"spot_floor_percent": 95}, "spot_floor_percent"),
        ({"spot_floor_percent": 0}, "spot_floor_percent"),
        ({"rank": 3}, "rank"),
        ({"ttft_s": 1.0}, "ttft_s"),
        ({"preemptible": False}, "preemptible"),
        ({"on_overload": "reject"}, "on_overload"),
        ({"credit_percent": 10}, "credit_percent"),
    ],
)
async def test_a_spot_class_with_impossible_terms_is_refused(
    start_gateway: StartGateway, engine: FakeEngineClient, change: dict[str, Any], named: str
) -> None:
    async with start_gateway([engine]) as gateway:
        refused = await gateway.admin("POST", "/classes", SPOT | change, 400)
        assert refused["error"]["param"] == named, refused


async def test_other_classes_stay_before_spot_classes_and_do_not_fall_back_to_them(gateway: RunningGateway) -> None:
    refused = await gateway.admin("PATCH", "/classes/batch", {"rank": 9}, 400)
    assert refused["error"]["param"] == "rank"
    refused = await gateway.admin("PATCH", "/classes/flex", {"on_overload": "downgrade", "downgrade_to": "spot"}, 400)
    assert refused["error"]["param"] == "downgrade_to"
    fixed = {"spot_floor_percent": None, "spot_ceiling_percent": None}
    changed = await gateway.admin("PATCH", "/classes/spot", fixed)
    assert (changed["spot_floor_percent"], changed["spot_ceiling_percent"]) == (None, None)
    status, _, answer = await send(gateway)
    assert (status, answer["error"]["code"]) == (400, "no_spot_class")

"""Engines that sleep while nobody needs them, and requests that wake them, through a running gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import structlog
from msgspec.structs import replace
from pydantic import ValidationError

from moiety_platform.bootstrap.engine_waker import open_scaler
from moiety_platform.clock import SystemClock
from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import Unavailable
from moiety_platform.live_settings import CannotApplySetting
from moiety_platform.routing.replicas import Replicas
from moiety_platform.settings import GatewaySettings
from moiety_platform.wake_on_request.store import WakeKind, note_time
from moiety_platform.wake_on_request.waker import EngineWaker
from moiety_platform.wake_settings import WakeSettings
from moiety_wire.engine_load import SleepState
from moiety_wire.messages import ModelCard

from .conftest import NewCard, RunningGateway, StartGateway, Until

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 4}
ON = {"wake_on_request": True}


def is_asleep(engine: FakeEngineClient) -> bool:
    return engine.state.sleep is SleepState.ASLEEP


def put_to_sleep(*engines: FakeEngineClient) -> None:
    for engine in engines:
        engine.set_asleep(asleep=True)
        assert is_asleep(engine)


async def chat(gateway: RunningGateway, **fields: Any) -> tuple[int, dict[str, str], Any]:
    status, headers, answer = await gateway.post(CHAT, {**ASK, **fields})
    return status, headers, json.loads(answer)


async def test_concurrent_requests_for_a_sleeping_model_wake_one_engine_once_and_are_all_served(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = [FakeEngineClient(new_card("one")), FakeEngineClient(new_card("two"))]
    async with start_gateway(engines, **ON) as gateway:
        put_to_sleep(*engines)
        engines[0].wake_s = engines[1].wake_s = 0.3
        answers = await asyncio.gather(*(chat(gateway) for _ in range(20)))
        assert [status for status, _, _ in answers] == [200] * 20
        assert sorted(engine.num_wakes for engine in engines) == [0, 1]
        rows = await gateway.rows.wait_for(20)
        assert all(row.outcome == "length" and row.output_tokens == 4 for row in rows), "each is billed once"
        assert len({row.request_id for row in rows}) == 20
        woken = next(engine for engine in engines if engine.num_wakes)
        assert len(woken.submits) == 20
        shown = (await gateway.request("GET", "/metrics"))[2].decode()
        assert 'moiety_wakes_total{model="tiny"} 1.0' in shown
        assert 'moiety_wake_waiting_requests{model="tiny"} 0.0' in shown


async def test_a_stream_that_waits_gets_keep_alives_and_then_its_answer(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], **ON, sse_keep_alive_s=0.05) as gateway:
        put_to_sleep(engine)
        engine.wake_s = 0.4
        status, headers, answer = await gateway.post(CHAT, {**ASK, "stream": True})
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        before, _, after = answer.partition(b"data:")
        assert before.count(b": keep-alive") >= 2
        assert b"1 2 3 4" in b"".join(json.loads(part)["choices"][0]["delta"].get("content", "").encode()
                                      for part in (b"data:" + after).decode().split("data: ")[1:]
                                      if not part.startswith("[DONE]") and json.loads(part)["choices"])  # fmt: skip
        assert answer.rstrip().endswith(b"[DONE]")


async def test_a_request_that_would_wait_longer_than_the_limit_is_refused_at_once_with_the_time(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], **ON, wake_timeout_s=30) as gateway:
        async with gateway.database.write() as session:
            await note_time(session, "tiny", WakeKind.WAKE, 90.0)
        put_to_sleep(engine)
        engine.wake_s = 3600
        asked = asyncio.create_task(chat(gateway))  # the measured time is read with the first request
        waker = gateway.assembled.services.waker
        assert waker is not None
        await until(lambda: waker.measured()[WakeKind.WAKE])
        status, headers, answer = await chat(gateway)
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "no_engine", "90")
        assert "90 s" in answer["error"]["message"]
        assert engine.num_wakes == 1, "it wakes all the same, for the retry"
        asked.cancel()


async def test_a_request_whose_engine_does_not_wake_in_time_is_refused(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], **ON, wake_timeout_s=0.3, sse_keep_alive_s=0.1) as gateway:
        put_to_sleep(engine)
        engine.wake_s = 3600
        status, headers, answer = await chat(gateway)
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert int(headers["retry-after"]) >= 1
        status, _, events = await gateway.post(CHAT, {**ASK, "stream": True})
        assert status == 200 and b'"no_engine"' in events, "an error after a keep-alive is an event of the stream"
        rows = await gateway.rows.wait_for(2)
        assert [row.output_tokens for row in rows] == [0, 0]
        assert {row.error_code for row in rows} == {"no_engine"}


async def test_only_a_key_that_may_use_the_model_wakes_it(start_gateway: StartGateway, new_card: NewCard) -> None:
    engines = [FakeEngineClient(new_card("one")), FakeEngineClient(new_card("two", "other"))]
    async with start_gateway(engines, **ON) as gateway:
        (project, *_) = (await gateway.admin("GET", "/projects"))["data"]
        new_key = {"name": "limited", "project_id": project["id"], "allowed_models": ["other"]}
        key = (await gateway.admin("POST", "/keys", new_key, expect=201))["secret"]
        put_to_sleep(engines[0])
        status, _, answer = await gateway.post(CHAT, ASK, key)
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")
        assert engines[0].num_wakes == 0


async def test_an_idle_engine_is_put_to_sleep_and_the_next_request_wakes_it(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], **ON, sleep_after_s=0.3) as gateway:
        assert (await chat(gateway))[0] == 200
        await until(lambda: is_asleep(engine))
        assert (await chat(gateway))[0] == 200
        assert (engine.num_wakes, len(engine.submits)) == (1, 2)
        await until(lambda: is_asleep(engine))


async def test_without_the_setting_a_sleeping_engine_stays_asleep(start_gateway: StartGateway, card: ModelCard) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine]) as gateway:
        put_to_sleep(engine)
        status, headers, _ = await chat(gateway)
        assert (status, headers["retry-after"], engine.num_wakes) == (503, "30", 0)


async def test_reload_changes_when_engines_sleep_and_which_are_started(
    start_gateway: StartGateway, new_card: NewCard, until: Until
) -> None:
    engines = [FakeEngineClient(replace(new_card(name, name), device_group="gpu0")) for name in ("a", "b", "c")]
    async with start_gateway(engines) as gateway:

        async def change(**settings: Any) -> None:
            await gateway.live.change(gateway.live.now.model_copy(update=settings))

        put_to_sleep(*engines)
        assert (await chat(gateway, model="a"))[0] == 503
        await change(**ON, device_group_awake=2, device_group_min_awake_s=60.0)
        assert [(await chat(gateway, model=name))[0] for name in "ab"] == [200, 200]
        assert [is_asleep(engine) for engine in engines] == [False, False, True]
        await change(wake_timeout_s=0.2)
        engines[2].wake_s = 3600
        assert (await chat(gateway, model="c"))[0] == 503
        await change(sleep_after_s=0.2)
        await until(lambda: is_asleep(engines[0]) and is_asleep(engines[1]))
        with pytest.raises(CannotApplySetting, match="Kubernetes"):
            await change(scaled_models=("d=pool",), stop_after_s=9.0)
        await change(scaled_models=("d",), wake_timeout_s=0.1)
        status, _, answer = await chat(gateway, model="d")
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        await change(scaled_models=())
        assert (await chat(gateway, model="d"))[0] == 404


async def test_a_route_with_a_fallback_does_not_wait_but_wakes_its_first_model(
    start_gateway: StartGateway, new_card: NewCard, until: Until
) -> None:
    large, small = FakeEngineClient(new_card("l", "large")), FakeEngineClient(new_card("s", "small"))
    async with start_gateway([large, small], **ON) as gateway:
        route = {"name": "best", "targets": [{"model": "large", "weight": 1}], "fallbacks": ["small"]}
        await gateway.admin("PUT", "/routes", route)
        put_to_sleep(large)
        status, _, answer = await chat(gateway, model="best")
        assert (status, answer["model"]) == (200, "small")
        await until(lambda: not is_asleep(large))
        assert (await chat(gateway, model="best"))[2]["model"] == "large"


async def test_lines_of_a_batch_wake_their_engine(start_gateway: StartGateway, card: ModelCard) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], **ON) as gateway:
        put_to_sleep(engine)
        engine.wake_s = 0.2
        line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": ASK}
        batch = await gateway.run_batch(json.dumps(line).encode())
        assert batch.request_counts is not None and batch.request_counts.completed == 1
        assert engine.num_wakes == 1


async def test_models_of_a_device_group_take_turns_and_are_never_awake_together(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = [FakeEngineClient(replace(new_card(name, name), device_group="gpu0")) for name in ("a", "b", "c")]
    for engine in engines:
        engine.wake_s = 0.05
    terms = {"device_group_min_awake_s": 0.3}
    async with start_gateway(engines, **ON, **terms) as gateway:
        put_to_sleep(*engines)
        most_awake, done = 0, asyncio.Event()

        async def watch() -> None:
            nonlocal most_awake
            while not done.is_set():
                most_awake = max(most_awake, sum(not is_asleep(engine) for engine in engines))
                await asyncio.sleep(0.002)

        async def ask(model: str, number: int) -> list[int]:
            return [(await chat(gateway, model=model))[0] for _ in range(number)]

        watching = asyncio.create_task(watch())
        answers = await asyncio.gather(*(ask(model, 3) for model in "abc" for _ in range(4)))
        done.set()
        await watching
        assert answers == [[200] * 3] * 12
        assert most_awake == 1
        assert all(1 <= engine.num_wakes <= 6 for engine in engines), [engine.num_wakes for engine in engines]


# ── pools without replicas ──


class Pools:
    """StatefulSets whose engines join the gateway. Implements PoolScaler."""

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self.changes: list[tuple[str, int]] = []
        self.engines: dict[str, FakeEngineClient] = {}
        self.gateway: RunningGateway | None = None
        self.is_down = self.hangs = False

    async def replicas(self, name: str) -> int:
        if self.is_down:
            raise Unavailable("Kubernetes' API cannot be reached", retry_after_s=1)
        if self.hangs:
            await asyncio.Event().wait()
        if name not in self.engines:
            raise Unavailable(f"Kubernetes has no StatefulSet {name}", retry_after_s=1)
        return self.wanted.get(name, 0)

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    async def scale(self, name: str, replicas: int) -> None:
        self.wanted[name] = replicas
        self.changes.append((name, replicas))
        engine, gateway = self.engines[name], self.gateway
        assert gateway is not None
        if replicas:
            await gateway.replicas.join(engine.address, lambda _: engine)
        else:
            gateway.replicas.retire(engine.address)


@asynccontextmanager
async def with_pools(
    start_gateway: StartGateway, engine: FakeEngineClient, **settings: Any
) -> AsyncIterator[tuple[RunningGateway, Pools]]:
    pools = Pools()
    pools.engines["pool"] = engine
    async with start_gateway([], open_scaler=lambda: pools, **ON, **settings) as gateway:
        pools.gateway = gateway
        yield gateway, pools


async def test_a_request_starts_a_statefulset_without_replicas_and_it_is_stopped_when_idle(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    settings: dict[str, Any] = {"scaled_models": "tiny=pool", "sleep_after_s": 0.2, "stop_after_s": 0.6}
    async with with_pools(start_gateway, FakeEngineClient(card), **settings) as (gateway, pools):
        assert (await gateway.request("GET", "/readyz"))[0] == 200, "else nobody could reach it to start an engine"
        answers = await asyncio.gather(*(chat(gateway) for _ in range(8)))
        assert [status for status, _, _ in answers] == [200] * 8
        assert pools.changes == [("pool", 1)]
        await until(lambda: pools.changes == [("pool", 1), ("pool", 0)])
        listed = json.loads((await gateway.request("GET", "/v1/models"))[2])
        assert [one["id"] for one in listed["data"]] == ["tiny"], "a stopped model is listed"
        assert (await chat(gateway))[0] == 200
        assert pools.changes[:3] == [("pool", 1), ("pool", 0), ("pool", 1)]
        status, _, answer = await chat(gateway, model="unknown")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_kubernetes_api_that_is_away_delays_the_start(start_gateway: StartGateway, card: ModelCard) -> None:
    async with with_pools(start_gateway, FakeEngineClient(card), scaled_models="tiny=pool") as (gateway, pools):
        pools.is_down = True
        asked = asyncio.create_task(chat(gateway))
        await asyncio.sleep(0.2)
        assert not asked.done() and not pools.changes
        pools.is_down = False
        assert (await asked)[0] == 200


async def test_a_statefulset_that_cannot_be_scaled_delays_no_other(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    async with with_pools(start_gateway, FakeEngineClient(card), scaled_models="a=gone,tiny=pool") as (gateway, pools):
        with structlog.testing.capture_logs() as logs:
            lost = asyncio.create_task(chat(gateway, model="a"))
            await until(lambda: any(line["event"] == "engine_pool_not_scaled" for line in logs))
            assert (await chat(gateway))[0] == 200
            assert pools.changes == [("pool", 1)]
        (first, *_) = (line for line in logs if line["event"] == "engine_pool_not_scaled")
        assert (first["statefulset"], first["model"]) == ("gone", "a")
        assert "no StatefulSet gone" in first["reason"] and first["retry_after_s"] > 0
        assert not any(line["event"] == "store_unreachable" for line in logs), "the database is there"
        lost.cancel()


async def test_a_kubernetes_api_that_hangs_does_not_keep_engines_asleep(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    async with with_pools(start_gateway, FakeEngineClient(card), scaled_models="tiny=pool,b=other") as (gateway, pools):
        assert (await chat(gateway))[0] == 200
        engine = pools.engines["pool"]
        pools.hangs = True
        lost = asyncio.create_task(chat(gateway, model="b"))
        waker = gateway.assembled.services.waker
        assert waker is not None
        await until(lambda: waker.waiting().get("b"))
        put_to_sleep(engine)
        async with asyncio.timeout(20):
            assert (await chat(gateway))[0] == 200
        lost.cancel()


async def test_a_model_that_an_autoscaler_starts_shows_its_waiting_requests(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    async with start_gateway([], **ON, scaled_models="tiny") as gateway:
        asked = asyncio.create_task(chat(gateway))
        waker = gateway.assembled.services.waker
        assert waker is not None
        await until(lambda: waker.waiting() == {"tiny": 1})
        shown = (await gateway.request("GET", "/metrics"))[2].decode()
        assert 'moiety_wake_waiting_requests{model="tiny"} 1.0' in shown
        engine = FakeEngineClient(card)
        await gateway.replicas.join(engine.address, lambda _: engine)
        assert (await asked)[0] == 200
        assert waker.waiting() == {"tiny": 0}


async def test_requests_that_do_not_wait_are_demands_that_an_autoscaler_reads(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    small = FakeEngineClient(new_card("s", "small"))
    async with start_gateway([small], **ON, wake_timeout_s=0.2, scaled_models="large,tiny") as gateway:
        route = {"name": "best", "targets": [{"model": "large", "weight": 1}], "fallbacks": ["small"]}
        await gateway.admin("PUT", "/routes", route)
        assert (await chat(gateway, model="best"))[2]["model"] == "small"
        assert (await chat(gateway))[0] == 503
        shown = (await gateway.request("GET", "/metrics"))[2].decode()
        assert 'moiety_wake_demands{model="large"} 1.0' in shown
        assert 'moiety_wake_demands{model="tiny"} 1.0' in shown, "it was rejected, and clients try again"
        assert 'moiety_wake_demands{model="small"} 0.0' in shown
        await gateway.rows.wait_for(2)
        shown = (await gateway.request("GET", "/metrics"))[2].decode()
        requests = [line for line in shown.splitlines() if line.startswith("moiety_requests_total")]
        assert any('model="tiny"' in line and 'status="503"' in line for line in requests), requests
        assert not any('model="unknown"' in line for line in requests)


def test_settings_that_cannot_work_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    refused: Sequence[tuple[dict[str, Any], str]] = (
        ({"sleep_after_s": 5}, "require wake_on_request"),
        ({"scaled_models": "a"}, "require wake_on_request"),
        ({**ON, "stop_after_s": 5}, "requires an entry MODEL=STATEFULSET"),
        ({**ON, "scaled_models": "a=b,a"}, "each model once"),
        ({**ON, "scaled_models": "a="}, "MODEL=STATEFULSET"),
        ({**ON, "scaled_models": "a=b", "sleep_after_s": 9, "stop_after_s": 8}, "sleeps before it is stopped"),
    )
    for settings, words in refused:
        with pytest.raises(ValidationError, match=words):
            GatewaySettings(**settings)
    with pytest.raises(CannotApplySetting, match="outside a cluster leave =STATEFULSET out"):
        open_scaler()


# ── several gateways ──


async def test_gateways_that_share_a_database_wake_an_engine_once_and_never_fill_a_group(
    start_gateway: StartGateway, new_card: NewCard, until: Until
) -> None:
    """The rounds of three wakers run at their own times, each with its own view of the same engines."""
    engines = [FakeEngineClient(replace(new_card(name, name), device_group="gpu0")) for name in ("a", "b")]
    for engine in engines:
        engine.wake_s = 0.2
    async with start_gateway(engines) as gateway, AsyncExitStack() as stack:
        put_to_sleep(*engines)
        url = str(gateway.database.engine.url)
        settings = WakeSettings(**ON, device_group_min_awake_s=0.2)
        wakers = [await _waker(stack, url, f"gateway-{number}", gateway.replicas, settings) for number in range(3)]
        await asyncio.gather(*(waker.wait_awake("a", 5.0) for waker in wakers for _ in range(5)))
        assert [engine.num_wakes for engine in engines] == [1, 0]
        asking = asyncio.gather(*(waker.wait_awake("b", 5.0) for waker in wakers))
        await until(lambda: engines[0].num_sleeps or asking.done())
        assert not asking.done(), "b wakes after a sleeps"
        await asking
        assert [(engine.num_wakes, is_asleep(engine)) for engine in engines] == [(1, True), (1, False)]
        assert sum(waker.num_wakes.get("b", 0) for waker in wakers) == 1


async def _waker(
    stack: AsyncExitStack, url: str, owner: str, replicas: Replicas, settings: WakeSettings
) -> EngineWaker:
    database = Database.open(url)
    stack.push_async_callback(database.close)

    def no_scaler() -> Any:
        raise CannotApplySetting("no cluster")

    waker = EngineWaker(owner, database, replicas, SystemClock(), settings, no_scaler)
    await waker.start()
    stack.push_async_callback(waker.stop)
    return waker

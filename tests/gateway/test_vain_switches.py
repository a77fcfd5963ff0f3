"""Switches between models of a device group that serve nobody: the engine that gave way does not stay asleep."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from moiety_platform.engine_client.base import EngineState
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.wake_on_request.activity import MAX_REFUSED_S, REFUSED_S, ActivityLog
from moiety_platform.wake_on_request.store import put_switches, read_switches
from moiety_wire.engine_load import SleepState

from .conftest import NewCard, RunningGateway, StartGateway, Until

CHAT = "/v1/chat/completions"
SETTINGS: dict[str, Any] = {"wake_on_request": True, "device_group_min_awake_s": 0.0}


def body(model: str, max_tokens: int = 4) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": max_tokens}


async def asked(gateway: RunningGateway, model: str, **fields: Any) -> tuple[int, Any]:
    status, _, answer = await gateway.post(CHAT, body(model) | fields)
    return status, json.loads(answer)


async def cancel(request: asyncio.Task[Any]) -> None:
    """Let the client of a request leave, and wait until the request has ended."""
    request.cancel()
    await asyncio.wait({request})


@pytest.fixture
def engines(new_card: NewCard) -> list[FakeEngineClient]:
    """Engines of the models a and b on one device; a sleeps."""
    made = [FakeEngineClient(replace(new_card(name, name), device_group="gpu0")) for name in ("a", "b")]
    for engine in made:
        engine.wake_s = 0.05
    return made


def state_of(engine: FakeEngineClient) -> SleepState:
    return engine.state.sleep


def reported(engine: FakeEngineClient, sleep: SleepState, problem: str = "") -> EngineState:
    """Return the engine's state with another state of sleep."""
    state = engine.state
    assert state.load is not None
    return replace(state, healthy=True, load=replace(state.load, sleep=sleep, sleep_problem=problem))


async def test_a_busy_engine_stays_awake_if_the_request_leaves_before_it_sleeps(
    start_gateway: StartGateway, engines: list[FakeEngineClient], until: Until
) -> None:
    a, b = engines
    b.token_s = 600.0
    async with start_gateway(engines, **SETTINGS) as gateway:
        a.set_asleep(asleep=True)
        long = asyncio.create_task(asked(gateway, "b"))
        await until(lambda: b.submits)
        leaving = asyncio.create_task(gateway.client.chat.completions.create(**body("a")))
        await until(lambda: b.num_sleeps)
        assert state_of(b) is SleepState.FALLING_ASLEEP, "its request runs"
        await cancel(leaving)
        await until(lambda: state_of(b) is SleepState.AWAKE)
        assert not long.done() and a.num_wakes == 0
        b.token_s = 0.0
        assert (await asked(gateway, "b"))[0] == 200, "it takes requests again"
        await cancel(long)


async def test_a_request_that_leaves_while_it_waits_counts_no_longer_and_others_do(
    start_gateway: StartGateway, engines: list[FakeEngineClient], until: Until
) -> None:
    a, b = engines
    b.token_s = 600.0
    async with start_gateway(engines, **SETTINGS | {"device_group_min_awake_s": 50.0}, wake_timeout_s=60.0) as gateway:
        waker = gateway.assembled.services.waker
        assert waker is not None
        a.set_asleep(asleep=True)
        busy = asyncio.create_task(asked(gateway, "b"))
        await until(lambda: b.submits)
        for notes_of_others in (0, 1):
            leaving = asyncio.create_task(gateway.client.chat.completions.create(**body("a")))
            await until(lambda: waker.waiting().get("a"))
            for _ in range(notes_of_others):
                waker.note_request("a")
            await cancel(leaving)
            await until(lambda: not waker.waiting().get("a"))
            assert waker.demands()["a"] == notes_of_others
        await cancel(busy)
    assert b.num_sleeps == 0


async def test_an_engine_that_has_gone_to_sleep_for_a_request_that_left_is_woken(
    start_gateway: StartGateway, engines: list[FakeEngineClient], until: Until
) -> None:
    a, b = engines
    a.wake_problem = "out of memory"
    async with start_gateway(engines, **SETTINGS, wake_timeout_s=30.0) as gateway:
        a.set_asleep(asleep=True)
        waiting = asyncio.create_task(asked(gateway, "a"))
        await until(lambda: a.num_wakes and state_of(b) is SleepState.AWAKE)
        assert (b.num_sleeps, b.num_wakes) == (1, 1), "it gave way, and was woken after a had failed"
        assert (await asked(gateway, "b"))[0] == 200
        assert (a.num_wakes, b.num_sleeps) == (1, 1), "it does not give way again while a's failure is recent"
        await cancel(waiting)


async def test_a_switch_that_serves_a_request_is_not_undone(
    start_gateway: StartGateway, engines: list[FakeEngineClient], until: Until
) -> None:
    a, b = engines
    async with start_gateway(engines, **SETTINGS, sleep_after_s=1.0) as gateway:
        a.set_asleep(asleep=True)
        assert (await asked(gateway, "a"))[0] == 200
        await until(lambda: state_of(a) is SleepState.ASLEEP)  # idle
        assert (b.num_sleeps, b.num_wakes) == (1, 0)


async def switches_of(gateway: RunningGateway) -> dict[str, str]:
    async with gateway.database.read() as session:
        return await read_switches(session)


async def test_a_gateway_wakes_an_engine_that_gave_way_to_a_request_of_one_that_is_gone(
    start_gateway: StartGateway, engines: list[FakeEngineClient], until: Until
) -> None:
    a, b = engines
    async with start_gateway(engines) as gateway, asyncio.timeout(60):
        for engine in (a, b):
            engine.set_asleep(asleep=True)
        await until(lambda: state_of(a) is state_of(b) is SleepState.ASLEEP)
        async with gateway.database.write() as session:
            await put_switches(session, {b.state.address: "a"})  # of a gateway that was killed before a was awake
        await gateway.live.change(gateway.live.now.model_copy(update=SETTINGS))
        await until(lambda: state_of(b) is SleepState.AWAKE)
        assert (a.num_wakes, b.num_wakes) == (0, 1)
        assert (await asked(gateway, "b"))[0] == 200
        while await switches_of(gateway):  # noqa: ASYNC110 - an administrator can let b sleep again
            await asyncio.sleep(0.02)


async def test_a_switch_is_known_to_all_gateways_until_it_has_ended(
    start_gateway: StartGateway, engines: list[FakeEngineClient], until: Until
) -> None:
    a, b = engines
    b.token_s = 600.0
    async with start_gateway(engines, **SETTINGS) as gateway, asyncio.timeout(60):
        a.set_asleep(asleep=True)
        busy = asyncio.create_task(asked(gateway, "b"))
        await until(lambda: b.submits)
        waiting = asyncio.create_task(asked(gateway, "a"))
        await until(lambda: b.num_sleeps)
        assert await switches_of(gateway) == {b.state.address: "a"}, "recorded before the command"
        await cancel(busy)  # the client's connection is closed, and b falls asleep
        assert (await waiting)[0] == 200
        while await switches_of(gateway):  # noqa: ASYNC110 - rows, which send no event
            await asyncio.sleep(0.02)
        assert (state_of(b), b.num_wakes) == (SleepState.ASLEEP, 0)


def test_an_engine_that_fails_again_and_again_pauses_longer_each_time(engines: list[FakeEngineClient]) -> None:
    woken: list[float] = []
    log = ActivityLog(lambda _, seconds: woken.append(seconds))
    state = reported(engines[0], SleepState.ASLEEP)
    now_s, pauses = 1000.0, []
    for _ in range(8):
        (view,) = log.observe([state], now_s)
        assert view.can_sleep
        log.sent(view.address, now_s, asleep=False)
        log.observe([reported(engines[0], SleepState.WAKING)], now_s + 1)
        failed = reported(engines[0], SleepState.ASLEEP, "out of memory")
        (view,) = log.observe([failed], now_s + 2)
        assert not view.can_sleep, "its return to sleep is that command's failure"
        pause_s = next(s for s in range(1, 10_000) if log.observe([failed], now_s + 2 + s)[0].can_sleep)
        pauses.append(pause_s)
        now_s += 2 + pause_s
    assert pauses == [min(REFUSED_S * 2**n, MAX_REFUSED_S) for n in range(8)]
    assert not woken

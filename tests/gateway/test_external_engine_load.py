"""Load of external engines, as their metrics or slots report it: routing, predicted waits and early refusals."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from moiety_platform.external_engines.client import Heartbeat
from moiety_platform.external_engines.waiting import EndedRequests, class_loads
from moiety_wire.classes import FLEX, PRIORITY, STANDARD

from .conftest import StartOver, Until
from .external_server import ASK, ClientOf, StartServer, client_of, folder, start_server

__all__ = ["client_of", "folder", "start_server"]  # fixtures


async def test_its_load_is_seen_and_routes_around_it(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    busy, idle = await start_server(), await start_server()
    busy.running, busy.waiting = 30, 12
    engines = client_of(busy), client_of(idle)
    async with start_over(*engines) as gateway:
        load = engines[0].state.load
        assert (load.num_running, load.num_waiting, load.kv_blocks_total, load.kv_blocks_used) == (30, 12, 200, 50)
        assert (load.prompt_tokens_total, load.output_tokens_total, load.requests_total) == (1234, 567, 7)
        assert engines[0].state.load_is_fresh
        for i in range(6):
            await gateway.client.chat.completions.create(
                **{**ASK, "messages": [{"role": "user", "content": f"{i}" * 40}]}
            )
        assert (len(busy.bodies), len(idle.bodies)) == (0, 6)
        status, _, answer = await gateway.request("GET", "/admin/v1/engines", b"", gateway.admin_key)
        assert (status, json.loads(answer)["data"][0]["card"]["family"]) == (200, "vllm")


async def test_load_of_llama_cpp_without_metrics_follows_from_its_slots(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    server = await start_server("llama.cpp")
    server.running = 3
    engine = client_of(server)
    async with start_over(engine):
        assert engine.state.load.num_running == 3  # this gateway has sent it nothing
        server.running = 1
        await until(lambda: engine.state.load.num_running != 3)
        assert engine.state.load.num_running == 1


async def test_a_long_queue_there_is_a_long_wait_here_and_too_long_a_one_is_refused_early(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    server = await start_server()
    engine = client_of(server)
    async with start_over(engine) as gateway:
        await gateway.client.chat.completions.create(**ASK)
        await until(lambda: engine.state.class_load("standard") is not None)
        assert engine.state.class_load("standard").predicted_ttft_s == 0
        server.waiting = 100_000  # and none of them ends
        await until(lambda: engine.state.class_load("standard").predicted_ttft_s > 2 * STANDARD.max_queue_s)
        with pytest.raises(openai.RateLimitError) as caught:
            await gateway.client.chat.completions.create(**ASK)
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert len(server.bodies) == 1


async def test_a_quiet_server_is_checked_less_often_until_its_metrics_change_or_a_request_comes(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    """The interval is 50 ms, and 200 ms of a quiet server."""
    server = await start_server()
    engine = client_of(server)
    async with start_over(engine) as gateway:
        await asyncio.sleep(1)
        server.probes.clear()
        await asyncio.sleep(2)
        assert 2 <= server.probes.count("/health") <= 15
        assert engine.state.load_is_fresh
        server.running = 7
        await until(lambda: engine.state.load.num_running == 7)
        server.running = 0
        await asyncio.sleep(1)
        server.probes.clear()
        await gateway.client.chat.completions.create(**ASK)
        await until(lambda: "/metrics" in server.probes)


async def test_a_quiet_server_that_falls_silent_is_lost(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    server = await start_server()
    engine = client_of(server, heartbeat=Heartbeat(interval_s=0.05, timeout_s=0.1, silence_s=0.3))
    async with start_over(engine):
        await asyncio.sleep(1)
        server.is_silent = True
        await until(lambda: not engine.state.healthy)
        assert engine.state.reason
        server.is_silent = False
        await until(lambda: engine.state.healthy)
        assert engine.state.reason == ""


async def test_the_end_of_an_idle_server_is_noticed_before_the_next_check(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    server = await start_server()
    engine = client_of(server, heartbeat=Heartbeat(interval_s=3600))
    async with start_over(engine):
        await server.kill()
        await until(lambda: not engine.state.healthy)
        assert "cannot be reached" in engine.state.reason


def test_the_wait_is_the_queue_times_the_pace_of_ends_and_less_for_a_better_rank() -> None:
    ends = EndedRequests()
    for at_s, num_ended in ((0.0, 90), (1.0, 3), (11.0, 8)):  # restarted after the first
        ends.note(at_s, num_ended)
    assert ends.seconds_each == 2.0
    admitted = {PRIORITY: 1, FLEX: 5}
    inflight = [(PRIORITY, False), (FLEX, False), (FLEX, False), (FLEX, False), (FLEX, True)]
    for by_priority, expected in ((False, [80.0, 80.0]), (True, [20.0, 80.0])):
        loads = class_loads(inflight, admitted, 40, ends.seconds_each, by_priority=by_priority)
        assert [load.predicted_ttft_s for load in loads] == expected
    assert [(load.num_waiting, load.num_running, load.admitted_total) for load in loads] == [(1, 0, 1), (3, 1, 5)]

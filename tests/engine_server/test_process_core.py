from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import structlog

from moiety_engine.scripted.script import Script
from moiety_engine.server.core_link import STOP_GRACE_S, ProcessCore
from moiety_engine.server.engine_server import Ending
from moiety_wire.messages import Abort, Extend, FailureCode, FinishReason, Hello, Stopping

SCRIPTED = "moiety_engine.scripted.core"


def core_of(script: Script, module: str = SCRIPTED, **options: Any) -> Any:
    return lambda context: ProcessCore(context, module, script, **options)


async def test_a_core_process_serves_and_ends_with_its_front(bench: Any, submit: Any) -> None:
    async with bench(make_core=core_of(Script())) as running:
        gateway = running.connect()
        answer = await gateway.ask(submit(prompt="é over a process", stopping=Stopping(100, stop=("process",))))
        assert (answer.text, answer.end.reason) == ("é over a ", FinishReason.STOP)
        await gateway.greet()
        await gateway.until_idle()
        running.front.begin_drain()
        assert await running.front.wait() is Ending.DRAINED
        assert running.core.returncode == 0


async def test_a_killed_core_fails_every_open_request_and_ends_the_server(bench: Any, submit: Any) -> None:
    with structlog.testing.capture_logs() as logs:
        async with bench(make_core=core_of(Script())) as running:
            gateway = running.connect()
            for i in range(5):
                await gateway.send(submit(f"r{i}", credit_tokens=i))
            await gateway.until(lambda: len(gateway.answers) == 5 and len(gateway.answers["r4"].token_ids) == 4)
            os.kill(running.core.pid, signal.SIGKILL)
            assert await running.front.wait() is Ending.CORE_DIED
            for i in range(5):
                end = (await gateway.finish(f"r{i}")).end
                assert (end.code, end.num_output_tokens) == (FailureCode.ENGINE_FAILED, i)
    died = next(entry for entry in logs if entry["event"] == "core_died")
    assert (died["log_level"], died["num_open"], died["was_ready"]) == ("error", 5, True)
    assert "signal 9" in died["reason"]


async def test_a_core_that_hangs_is_killed_and_every_open_request_fails(bench: Any, submit: Any) -> None:
    with structlog.testing.capture_logs() as logs:
        async with bench(make_core=core_of(Script(), silence_s=1.0)) as running:
            gateway = running.connect()
            await gateway.send(submit(credit_tokens=2))
            await gateway.until(lambda: gateway.answers and len(gateway.answers["r"].token_ids) == 2)
            os.kill(running.core.pid, signal.SIGSTOP)
            async with asyncio.timeout(60):
                assert await running.front.wait() is Ending.CORE_DIED
            end = (await gateway.finish()).end
            assert (end.code, end.num_output_tokens) == (FailureCode.ENGINE_FAILED, 2)
            assert running.core.returncode == -signal.SIGKILL
    died = [entry["reason"] for entry in logs if entry["event"] == "core_died"]
    assert len(died) == 1
    assert "sent no message for 1 s" in died[0]


async def test_a_core_that_has_nothing_to_do_is_not_taken_for_hung(bench: Any, submit: Any) -> None:
    async with bench(make_core=core_of(Script(), silence_s=1.0)) as running:
        gateway = running.connect()
        await gateway.greet()
        await gateway.until_load(lambda _: len(gateway.loads) == 100)  # two seconds
        assert (await gateway.ask(submit())).text == "hello"


@pytest.mark.parametrize("make_core", [None, core_of(Script(max_running=1))], ids=["in process", "a process"])
async def test_loads_tell_of_requests_that_bring_no_output(bench: Any, submit: Any, make_core: Any) -> None:
    async with bench(Script(max_running=1), make_core=make_core) as running, asyncio.timeout(60):
        gateway = running.connect()
        await gateway.greet()
        await gateway.send(submit("parked", credit_tokens=0))
        await gateway.until(lambda: (gateway.loads[-1].num_running, gateway.loads[-1].num_paused) == (0, 1))
        assert (
            await gateway.ask(submit("overtakes"))
        ).text == "hello"  # what has no credit holds no place in the batch
        await gateway.send(Abort("parked", 1))
        await gateway.until_idle()


async def test_a_core_that_is_still_loading_is_ended_without_waiting_for_it(bench: Any) -> None:
    async with bench(make_core=core_of(Script(loads_for_ever=True)), wait_ready=False) as running:
        running.front.begin_drain()
        async with asyncio.timeout(STOP_GRACE_S / 2):
            assert await running.front.wait() is Ending.DRAINED
        assert running.core.returncode in (3, -signal.SIGKILL)  # the latter if it was still importing


async def test_messages_that_the_core_sent_before_it_died_arrive(bench: Any, submit: Any) -> None:
    async with bench(make_core=core_of(Script(dies_at_step=3))) as running:
        answer = await running.connect().ask(submit())
        assert (answer.end.code, len(answer.token_ids)) == (FailureCode.ENGINE_FAILED, 3)


async def test_a_dead_core_tells_whose_first_token_it_computed(bench: Any, submit: Any) -> None:
    async with bench(make_core=core_of(Script(dies_at_step=2, max_running=1))) as running:
        gateway = running.connect()
        await gateway.send(submit("answered", credit_tokens=2))
        await gateway.until(lambda: gateway.answers and len(gateway.answers["answered"].token_ids) == 2)
        for name in ("begun", "waiting"):
            await gateway.send(submit(name))
        assert await running.front.wait() is Ending.CORE_DIED
        ends = {name: (await gateway.finish(name)).end for name in ("answered", "begun", "waiting")}
        assert {end.code for end in ends.values()} == {FailureCode.ENGINE_FAILED}
        assert {name: end.in_first_step for name, end in ends.items()} == {
            "answered": False,
            "begun": True,
            "waiting": False,
        }


async def test_an_answer_that_a_stop_string_completed_is_not_lost_with_the_core(bench: Any, submit: Any) -> None:
    async with bench(make_core=core_of(Script(dies_at_step=3))) as running:
        gateway = running.connect()
        await gateway.send(submit("open", credit_tokens=0))
        answer = await gateway.ask(submit(prompt="abc", stopping=Stopping(10, stop=("c",))))
        assert (answer.text, answer.end.reason, answer.end.detail) == ("ab", FinishReason.STOP, "c")


async def test_a_core_that_refuses_to_start_ends_the_front_with_its_reason(bench: Any) -> None:
    with structlog.testing.capture_logs() as logs:
        script = Script(refuses="the checkpoint is of an unknown family")
        async with bench(make_core=core_of(script), wait_ready=False) as running:
            gateway = running.connect()
            await gateway.send(Hello("gateway"))
            assert not await running.front.wait_ready()
            assert await running.front.wait() is Ending.CORE_DID_NOT_START
    assert [entry["reason"] for entry in logs if entry["event"] == "core_died"] == [script.refuses]


async def test_a_core_that_cannot_even_be_imported_ends_the_front(bench: Any) -> None:
    async with bench(make_core=core_of(Script(), "moiety_engine.no_such_core"), wait_ready=False) as running:
        assert await running.front.wait() is Ending.CORE_DID_NOT_START


def test_a_core_ends_when_its_life_line_closes() -> None:
    command = [sys.executable, "-m", SCRIPTED, "--address", "ipc:///nonexistent/never.sock"]
    ended = subprocess.run(command, input=msgspec.json.encode(Script()) + b"\n", timeout=90, check=False)
    assert ended.returncode == 3


async def test_extensions_reach_a_core_process(bench: Any, submit: Any) -> None:
    async with bench(make_core=core_of(Script())) as running:
        gateway = running.connect()
        await gateway.send(submit(credit_tokens=1))
        await gateway.until(lambda: gateway.answers and gateway.answers["r"].token_ids)
        await gateway.send(Extend("r", 1, 100))
        assert (await gateway.finish()).text == "hello"

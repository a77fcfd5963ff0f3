"""Sleep mode of an engine: it finishes open requests, refuses new ones, and wakes on request."""

from __future__ import annotations

from typing import Any

from moiety_engine.scripted.script import Script
from moiety_wire.engine_load import SleepState
from moiety_wire.messages import Extend, Failed, FailureCode, Finished, SleepCommand, Stopping


async def test_an_engine_sleeps_once_what_is_open_has_ended_and_takes_nothing_until_it_is_woken(
    bench: Any, submit: Any
) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.greet()
        await gateway.send(submit("open", credit_tokens=1, stopping=Stopping(max_tokens=3)))
        await gateway.until(lambda: "open" in gateway.answers and gateway.answers["open"].token_ids)
        await gateway.send(SleepCommand(asleep=True))
        await gateway.until_load(lambda load: load.sleep is SleepState.FALLING_ASLEEP)
        late = await gateway.ask(submit("late"))
        assert isinstance(late.end, Failed)
        assert late.end.code is FailureCode.DRAINING
        assert "wake it" in late.end.message
        await gateway.send(Extend("open", 1, 100))
        assert isinstance((await gateway.finish("open")).end, Finished)
        await gateway.until_load(lambda load: load.sleep is SleepState.ASLEEP)
        assert isinstance((await gateway.ask(submit("asleep"))).end, Failed)
        await gateway.send(SleepCommand(asleep=False))
        await gateway.until_load(lambda load: load.sleep is SleepState.AWAKE)
        assert isinstance((await gateway.ask(submit("awake"))).end, Finished)


async def test_an_engine_that_sleeps_still_ends_when_it_is_told_to(bench: Any) -> None:
    async with bench(Script()) as running:
        gateway = running.connect()
        await gateway.greet()
        await gateway.send(SleepCommand(asleep=True))
        await gateway.until_load(lambda load: load.sleep is SleepState.ASLEEP)
        running.front.begin_drain()
        assert await running.front.wait() == 0

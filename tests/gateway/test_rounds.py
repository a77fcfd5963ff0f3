"""Periodic tasks continue whatever a round raises, and end when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from moiety_platform.errors import Unavailable
from moiety_platform.periodic_task import PeriodicTask

LONG_S = 3600.0
DEADLINE_S = 60.0


class Work:
    """Waits for a permit in each round, and raises what it is given with it."""

    def __init__(self) -> None:
        self.permits: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.begun = asyncio.Semaphore(0)
        self.num_done = 0

    async def __call__(self) -> None:
        self.begun.release()
        error = await self.permits.get()
        if error is not None:
            raise error
        self.num_done += 1


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture(autouse=True)
async def in_time() -> AsyncIterator[None]:
    async with asyncio.timeout(DEADLINE_S):
        yield


async def test_rounds_are_made_by_the_clock_and_when_woken(work: Work) -> None:
    by_clock, woken = PeriodicTask("by-clock", work, 0.001), PeriodicTask("woken", work, LONG_S)
    for rounds in (by_clock, woken):
        rounds.start()
    await work.begun.acquire()  # by the clock, and it waits for its permit from now on
    woken.wake()
    await work.begun.acquire()
    await by_clock.cancel()
    await woken.cancel()
    assert work.num_done == 0


async def test_an_outage_is_logged_once_and_the_task_continues(work: Work, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = PeriodicTask("counting", work, 0.001)
    rounds.start()
    away = Unavailable("the database is away")
    for error in (away, away, None, away, ValueError("odd"), None):
        await work.begun.acquire()
        work.permits.put_nowait(error)
    await work.begun.acquire()
    await rounds.cancel()
    said = [line for line in capsys.readouterr().out.splitlines() if "task=counting" in line]
    assert work.num_done == 2
    assert ["store_unreachable" in line for line in said] == [True, True, False]
    assert "periodic_task_failed" in said[2]


async def test_periodic_task_ignores_wake_ups_after_a_failure_and_obeys_stop(work: Work) -> None:
    rounds = PeriodicTask("pausing", work, 0.001, pause_s=LONG_S)
    work.permits.put_nowait(Unavailable("the database is away"))
    rounds.start()
    await work.begun.acquire()
    rounds.wake()
    assert await rounds.stop()
    assert work.begun.locked()  # no other round


async def test_a_stop_waits_for_the_round_that_is_being_made(work: Work) -> None:
    rounds = PeriodicTask("stopping", work, 0.001)
    rounds.start()
    await work.begun.acquire()
    stopping = asyncio.create_task(rounds.stop())
    await asyncio.wait({stopping}, timeout=0)
    assert rounds.is_stopping and not stopping.done()
    work.permits.put_nowait(None)
    assert await stopping
    assert (work.num_done, await rounds.stop()) == (1, False)

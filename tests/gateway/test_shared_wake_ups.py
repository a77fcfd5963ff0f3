"""Timers of an idle gateway end together, and none of them much later than its interval."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moiety_platform.bootstrap.server import TICK_S, GatewayServer
from moiety_platform.connections import ConnectionLimits
from moiety_platform.engine_client.session_timer import NUM_SLOTS, SESSIONS_A_SLOT, SessionTimer
from moiety_platform.listening import bind
from moiety_platform.settings import GatewaySettings
from moiety_platform.shared_wake_ups import ALIGN_S, LEAST_SHARE, LONG_ALIGN_S, next_round_s, process_phase_s

times = st.floats(0, 1e7)
phases = st.floats(0, ALIGN_S, exclude_max=True)
aligned = st.integers(1, 1000).map(lambda turns: turns * ALIGN_S)
EPSILON_S = 1e-6
DEADLINE_S = 60.0


@given(times, st.one_of(st.floats(0.001, 3600), aligned), phases)
@example(10.0, ALIGN_S, 0.0)
@example(9.999, ALIGN_S, 0.0)
def test_a_round_begins_at_most_a_little_after_its_interval(now_s: float, every_s: float, phase_s: float) -> None:
    wait_s = next_round_s(now_s, every_s, phase_s) - now_s
    assert wait_s >= min(every_s, max(LEAST_SHARE * every_s, every_s - LONG_ALIGN_S)) - EPSILON_S
    assert wait_s <= every_s * (1 + LEAST_SHARE) + EPSILON_S


@given(times, aligned, phases)
def test_rounds_are_at_the_phase_of_the_process(now_s: float, every_s: float, phase_s: float) -> None:
    align_s = ALIGN_S if every_s % LONG_ALIGN_S else LONG_ALIGN_S
    turns = (next_round_s(now_s, every_s, phase_s) - phase_s) / align_s
    assert abs(turns - round(turns)) < EPSILON_S


@given(phases, st.sampled_from([0.5, 1.0, 2.5, 3.0, 5.0, 15.0]), st.integers(0, 10**6))
def test_a_task_keeps_its_interval(phase_s: float, every_s: float, turn: int) -> None:
    at_s = turn * LONG_ALIGN_S + phase_s
    for _ in range(10):
        late_s = next_round_s(at_s + 0.01, every_s, phase_s)  # the round itself takes a while
        assert late_s - at_s == pytest.approx(every_s)
        at_s = late_s


def test_the_phase_is_one_for_the_whole_process() -> None:
    assert 0 <= process_phase_s() < ALIGN_S
    assert process_phase_s() == process_phase_s()


async def test_sessions_are_called_in_the_same_wake_up_until_they_are_removed() -> None:
    timer, turns, loop = SessionTimer(), [0], asyncio.get_running_loop()
    called: list[tuple[int, str]] = []

    def tick_of(name: str) -> Callable[[], None]:
        def tick() -> None:
            if not called or called[-1][0] != turns[0]:
                loop.call_soon(lambda: turns.__setitem__(0, turns[0] + 1))
            called.append((turns[0], name))

        return tick

    first, second = tick_of("first"), tick_of("second")
    timer.add(first)
    timer.add(second)
    async with asyncio.timeout(DEADLINE_S):
        while len(called) < 4:  # noqa: ASYNC110  a timer has no event
            await asyncio.sleep(0.01)
    assert called[:4] == [(0, "first"), (0, "second"), (1, "first"), (1, "second")]
    timer.remove(first)
    called.clear()
    async with asyncio.timeout(DEADLINE_S):
        while len(called) < 2:  # noqa: ASYNC110  a timer has no event
            await asyncio.sleep(0.01)
    timer.remove(second)
    timer.remove(second)
    assert {name for _, name in called} == {"second"}


async def test_an_error_of_one_session_delays_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    timer, called = SessionTimer(), asyncio.Event()

    def fail() -> None:
        raise ValueError("odd")

    timer.add(fail)
    timer.add(called.set)
    async with asyncio.timeout(DEADLINE_S):
        await called.wait()
    timer.remove(fail)
    timer.remove(called.set)
    assert "session_tick_failed" in capsys.readouterr().out


async def test_many_sessions_are_spread_over_the_interval() -> None:
    timer = SessionTimer()
    ticks: list[Callable[[], None]] = [lambda number=number: None for number in range(NUM_SLOTS * SESSIONS_A_SLOT + 1)]  # type: ignore[misc]
    for tick in ticks:
        timer.add(tick)
    counts = sorted(len(slot) for slot in timer._slots)
    assert counts == [*[SESSIONS_A_SLOT] * (NUM_SLOTS - 1), SESSIONS_A_SLOT + 1]
    for tick in ticks:
        timer.remove(tick)
    assert not timer._handles, "an idle timer has no wake-ups"


class CountingServer(GatewayServer):
    num_ticks = 0

    async def on_tick(self, counter: int) -> bool:
        self.num_ticks += 1
        return await super().on_tick(counter)


@pytest.fixture
async def serving() -> AsyncIterator[tuple[CountingServer, Callable[[], Awaitable[bytes]]]]:
    """A server, and a function that returns the Date header of its answer."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    started, listener = asyncio.Event(), bind("127.0.0.1", 0)
    server = CountingServer(app, 1, ConnectionLimits.of(GatewaySettings()), started.set)
    running = asyncio.create_task(server.serve([listener]))
    await started.wait()

    async def date() -> bytes:
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"date:"))

    async with asyncio.timeout(DEADLINE_S):
        yield server, date
        server.request_exit()
        await running


async def test_a_server_renews_its_date_and_wakes_up_for_nothing_else(
    serving: tuple[CountingServer, Callable[[], Awaitable[bytes]]],
) -> None:
    server, date = serving
    begin_s, first = time.monotonic(), await date()
    while await date() == first:  # noqa: ASYNC110  a server has no event for it
        await asyncio.sleep(0.02)
    during_s = time.monotonic() - begin_s
    assert server.num_ticks <= 3 + during_s / (TICK_S - ALIGN_S), "uvicorn's own loop has ten in a second"

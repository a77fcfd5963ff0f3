"""Periodic background tasks that live as long as the process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from moiety_platform.disk_full import store_advice
from moiety_platform.errors import Unavailable
from moiety_platform.shared_wake_ups import next_round_s, process_phase_s

log = structlog.get_logger(__name__)


class PeriodicTask:
    """Runs `work`, logged as `name`, every `every_s`, and at once when woken. For one event loop.

    Tasks share the wake-ups of the process, so a round can begin up to `ALIGN_S` before the end of its interval.

    Owned by the owner of the work. An exception in a round does not end the task: a database that is down is logged
    once, any other error each time, and for `pause_s` it cannot be woken.
    """

    def __init__(
        self, name: str, work: Callable[[], Awaitable[object]], every_s: float, *, pause_s: float = 0.0
    ) -> None:
        self._name = name
        self._work = work
        self.every_s = every_s  # can be changed, for the rounds after the next
        self._pause_s = pause_s
        self._woken = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self._name)

    def wake(self) -> None:
        """Run a round at once, or another one after the current round."""
        self._woken.set()

    async def stop(self) -> bool:
        """Wait for the current round, which is the last one; return False if nothing was running."""
        if self._task is None:
            return False
        self._stopping.set()
        self._woken.set()
        await self._task
        self._task = None
        return True

    async def cancel(self) -> None:
        """Stop at once, in the middle of a round. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def _run(self) -> None:
        is_unreachable = False
        while True:
            await self._wait_for_round()
            if self.is_stopping:
                return
            self._woken.clear()
            try:
                await self._work()
            except Unavailable as error:
                if not is_unreachable:
                    log.warning(
                        "store_unreachable",
                        task=self._name,
                        reason=str(error),
                        advice=store_advice(error),
                    )
                is_unreachable = True
                await _wait(self._stopping, self._pause_s)
            except Exception:  # top level of a task that lives as long as the process: logged, and retried
                log.exception("periodic_task_failed", task=self._name)
                await _wait(self._stopping, self._pause_s)
            else:
                is_unreachable = False

    async def _wait_for_round(self) -> None:
        """Wait until the next round is due, or until it is woken. A timer costs less than a timeout of the wait."""
        loop = asyncio.get_running_loop()
        timer = loop.call_at(next_round_s(loop.time(), self.every_s, process_phase_s()), self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()


async def _wait(event: asyncio.Event, at_most_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await event.wait()

"""Detection of a part that runs but does not respond: its event loop is blocked, or it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moiety_platform.supervisor.ports import http_get
from moiety_platform.supervisor.process import ComponentProcess

CHECKS_PER_TIMEOUT = 4


class HangWatch:
    """Watch over one run of a part, by its heartbeats or, if it sends none, by its health probe.

    Silent checks are counted instead of seconds: a supervisor that was itself suspended heard nothing then. A part is
    watched from its first response, since its start can take any time, until it closes the pipe of its heartbeats.
    """

    def __init__(self, run: ComponentProcess, timeout_s: float, on_hang: Callable[[ComponentProcess], None]) -> None:
        """`on_hang` is called once, with the run, after about `timeout_s` without a response; never if it is 0."""
        self._run = run
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._num_heard = 0
        self.has_found_hang = False

    async def watch(self) -> None:
        """Check until the part hangs; cancelled by the caller when the part has ended."""
        num_silent, was_heard = 0, False
        while self._timeout_s > 0:
            has_responded = await self._check(self._timeout_s / CHECKS_PER_TIMEOUT)
            was_heard = was_heard or has_responded
            num_silent = 0 if has_responded else num_silent + 1
            if was_heard and num_silent >= CHECKS_PER_TIMEOUT:
                self.has_found_hang = True
                self._on_hang(self._run)
                return

    async def _check(self, interval_s: float) -> bool:
        """Return, after the interval, whether the part has responded within it."""
        probe = self._run.part.health
        if probe is None:
            await asyncio.sleep(interval_s)
            before, self._num_heard = self._num_heard, self._run.num_heartbeats
            return self._num_heard > before or self._run.has_ended_heartbeats
        pause = asyncio.create_task(asyncio.sleep(interval_s))
        try:
            answer = await http_get(*probe, interval_s)
            await pause
        finally:
            pause.cancel()
        return answer is not None

"""Heartbeats of a process to its supervisor: evidence that its event loop still runs.

A supervisor gives the write end of a pipe and an interval to a process, in one environment variable. The process
writes one byte in each interval, from its event loop, so that a loop that is blocked sends none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, MutableMapping

VARIABLE = "MOIETY_HEARTBEAT"  # "DESCRIPTOR:INTERVAL_S"


def heartbeat_variable(fd: int, interval_s: float) -> dict[str, str]:
    """Return the environment of a process that inherits `fd`, the write end of its supervisor's pipe."""
    return {VARIABLE: f"{fd}:{interval_s}"}


@contextlib.contextmanager
def sending_heartbeats(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Send heartbeats from the running event loop during the block, if a supervisor asks for them.

    The variable is removed from the environment, since child processes do not inherit the pipe.
    """
    given = environment.pop(VARIABLE, "")
    if not given:
        yield
        return
    fd, _, interval_s = given.partition(":")
    sender = _HeartbeatSender(int(fd), float(interval_s))
    try:
        sender.send()
        yield
    finally:
        sender.close()


class _HeartbeatSender:
    """Periodic writer to the pipe; for one event loop."""

    def __init__(self, fd: int, interval_s: float) -> None:
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
        self._fd = fd
        self._interval_s = interval_s
        self._timer: asyncio.TimerHandle | None = None

    def send(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, or its reader has ended
            os.write(self._fd, b"\0")
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.send)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        os.close(self._fd)

"""Resolution of host names that clients choose, in separate threads.

A name whose server does not answer occupies a thread for up to half a minute, and a call of the resolver cannot be
ended. The threads of the event loop, which resolve all other names of the process, must not wait behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from moiety_platform.webhooks.addresses import Found

MAX_LOOKUPS = 64  # at the same time in this process


def new_pool() -> ThreadPoolExecutor:
    """Return the threads for look-ups; they start as they are needed."""
    return ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="image-link-name")


class DnsLookup:
    """One look-up, which may go on in its thread after its caller was cancelled."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._running: Future[Found] | None = None

    async def __call__(self, host: str, port: int | None) -> Found:
        """Return what the system's resolver answers. Raises its OSError."""
        self._running = self._pool.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        return await asyncio.wrap_future(self._running)

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call the function on the event loop once no thread works for this look-up: now, if none does."""
        if self._running is None or self._running.done():
            callback()
            return
        self._running.add_done_callback(partial(_call_on, asyncio.get_running_loop(), callback))


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], object], _: Future[Found]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(callback)

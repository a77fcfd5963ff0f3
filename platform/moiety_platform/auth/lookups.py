"""Queues of key look-ups with bounded length; one statement reads many ids.

Look-ups of existing keys and of keys that may not exist wait in separate queues, so that a flood of invented ids
neither delays nor fails other requests. Independent of the looked-up values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from moiety_platform.clock import Clock
from moiety_platform.db.failures import RETRY_AFTER_S
from moiety_platform.errors import Unavailable

T = TypeVar("T")

Read = Callable[[Sequence[str]], Awaitable[Mapping[str, T]]]


@dataclass(eq=False)
class LookupQueue(Generic[T]):
    """Queue of look-ups of one kind.

    At most `max_statements` run at once, each with at most `max_batch` ids, and at most `max_waiting` ids wait. Callers
    with the same id share one look-up, which no caller's cancellation cancels. An id waits `gather_s` for others, so
    that one statement reads them all. After a failure nothing is read for `pause_s`. Owned by the authenticator; for
    one event loop.
    """

    name: str
    read: Read[T]
    clock: Clock
    _: KW_ONLY
    max_statements: int
    max_waiting: int
    max_batch: int
    gather_s: float = 0.0
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        self._paused_until_s = float("-inf")
        self._waiting: dict[str, asyncio.Future[T]] = {}
        self._running: dict[str, asyncio.Future[T]] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._num_reading = 0  # readers that will still check the waiting ids

    @property
    def num_waiting(self) -> int:
        """Number of ids that wait for a statement, without those of running statements."""
        return len(self._waiting)

    @property
    def num_statements(self) -> int:
        """Number of running statements."""
        return self._num_reading

    def begin(self, key_id: str) -> asyncio.Future[T]:
        """Return the look-up of an id. Raises Unavailable where too many ids wait, or a look-up has just failed.

        The look-up runs whether or not a caller waits for it; do not cancel it. It fails with the errors of `read`.
        """
        found = self._waiting.get(key_id) or self._running.get(key_id)
        if found is not None:
            return found
        if len(self._waiting) >= self.max_waiting or self.clock.monotonic() < self._paused_until_s:
            raise cannot_check()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._waiting[key_id] = future
        if self._num_reading < self.max_statements:
            self._num_reading += 1
            reader = asyncio.create_task(self._read_waiting(), name=f"key-lookup-{self.name}")
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
        return future

    def forget(self, key_id: str) -> None:
        """Detach running look-ups of a changed key.

        Their results may be stale, so later callers start another look-up.
        """
        self._running.pop(key_id, None)

    async def close(self) -> None:
        """Cancel all look-ups, which fail with Unavailable."""
        readers = list(self._readers)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        self._fail_all(self._waiting, cannot_check())

    async def _read_waiting(self) -> None:
        """Read batches until no id waits."""
        try:
            while self._waiting:
                if self.gather_s:
                    await asyncio.sleep(self.gather_s)
                await self._read_batch()
        except BaseException:  # a defect, or the end of the process: raise again after the waiting callers have failed
            self._fail_all(self._waiting, cannot_check())
            raise
        finally:  # in the same event-loop step in which it saw that no id waits
            self._num_reading -= 1

    async def _read_batch(self) -> None:
        batch = {key_id: self._waiting.pop(key_id) for key_id in list(self._waiting)[: self.max_batch]}
        self._running |= batch
        try:
            found = await self.read(list(batch))
        except Unavailable as error:
            self._paused_until_s = self.clock.monotonic() + self.pause_s
            self._fail_all(batch, error)
            if self.pause_s:
                self._fail_all(self._waiting, error)
        else:
            for key_id, future in batch.items():
                if not future.done():
                    future.set_result(found[key_id])
        finally:
            self._fail_all(batch, cannot_check())  # after any other end
            for key_id, future in batch.items():
                if self._running.get(key_id) is future:
                    del self._running[key_id]

    def _fail_all(self, futures: dict[str, asyncio.Future[T]], error: Exception) -> None:
        for future in futures.values():
            if not future.done():
                future.set_exception(error)
        if futures is self._waiting:
            futures.clear()


class StoreHealth:
    """Health of the store, from look-ups of existing keys.

    The store counts as down after a failed connection, or after `max_timeouts` consecutive timeouts, unless a later
    look-up was answered.
    """

    def __init__(self, clock: Clock, pause_s: float, max_timeouts: int = 2) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._max_timeouts = max_timeouts
        self._num_timeouts = 0
        self._answered_s = float("-inf")  # start time of the latest answered look-up
        self._paused_until_s = float("-inf")
        self.is_unreachable = False

    @property
    def is_paused(self) -> bool:
        """True while the store is not queried after a failure."""
        return self._clock.monotonic() < self._paused_until_s

    def answered(self, asked_s: float) -> None:
        """Record the success of a look-up that began at `asked_s`."""
        self._answered_s = max(self._answered_s, asked_s)
        self._num_timeouts = 0
        self.is_unreachable = False

    def failed(self, asked_s: float, *, timed_out: bool) -> bool:
        """Record a failed look-up. Return whether the store counts as down since this call."""
        if self._answered_s > asked_s:
            return False
        self._num_timeouts += timed_out
        if timed_out and self._num_timeouts < self._max_timeouts and not self.is_unreachable:
            return False
        was_away, self.is_unreachable = self.is_unreachable, True
        self._paused_until_s = self._clock.monotonic() + self._pause_s
        return not was_away


def cannot_check() -> Unavailable:
    return Unavailable(
        "API keys cannot be checked right now; try again shortly.",
        code="store_unavailable",
        retry_after_s=RETRY_AFTER_S,
    )


def _retrieve(future: asyncio.Future[T]) -> None:
    """Retrieve the exception, even if every caller was cancelled."""
    if not future.cancelled():
        future.exception()

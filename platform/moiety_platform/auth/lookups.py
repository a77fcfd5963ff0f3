"""Queues of key look-ups: what waits for the database is bounded, and many ids are read by one statement.

Look-ups of keys that exist and of keys that may not exist wait in queues of their own, so that a flood of invented ids
delays and fails nobody else. Knows nothing of what a look-up finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, TypeVar

from moiety_platform.clock import Clock
from moiety_platform.db.failures import RETRY_AFTER_S
from moiety_platform.errors import Unavailable

T = TypeVar("T")

Read = Callable[[Sequence[str]], Awaitable[Mapping[str, T]]]


class LookupQueue(Generic[T]):
    """Look-ups of one kind. At most `max_statements` run at once, each of at most `max_batch` ids, and at most
    `max_waiting` ids wait. Callers that ask for the same id share one look-up, and none of them cancels it by leaving.
    An id waits `gather_s` for others, so that one statement reads them all. After a failure nothing is read for
    `pause_s`. Owned by the authenticator; one event loop."""

    def __init__(
        self,
        name: str,
        read: Read[T],
        clock: Clock,
        *,
        max_statements: int,
        max_waiting: int,
        max_batch: int,
        gather_s: float = 0.0,
        pause_s: float = 0.0,
    ) -> None:
        self._name = name
        self._read = read
        self._clock = clock
        self._max_statements = max_statements
        self._max_waiting = max_waiting
        self._max_batch = max_batch
        self._gather_s = gather_s
        self._pause_s = pause_s
        self._paused_until_s = float("-inf")
        self._waiting: dict[str, asyncio.Future[T]] = {}
        self._running: dict[str, asyncio.Future[T]] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._num_reading = 0  # of the readers, those that will look at what waits

    @property
    def num_waiting(self) -> int:
        """Ids that wait for a statement, those that one reads just now not among them."""
        return len(self._waiting)

    @property
    def num_statements(self) -> int:
        """Statements under way."""
        return self._num_reading

    def begin(self, key_id: str) -> asyncio.Future[T]:
        """The look-up of an id, which goes on whether or not anybody waits for it; do not cancel it. It fails with
        what `read` raises. Raises Unavailable where too many wait, or a look-up has just failed."""
        found = self._waiting.get(key_id) or self._running.get(key_id)
        if found is not None:
            return found
        if len(self._waiting) >= self._max_waiting or self._clock.monotonic() < self._paused_until_s:
            raise cannot_check()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._waiting[key_id] = future
        if self._num_reading < self._max_statements:
            self._num_reading += 1
            reader = asyncio.create_task(self._read_waiting(), name=f"key-lookup-{self._name}")
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
        return future

    def forget(self, key_id: str) -> None:
        """The key was changed: a look-up under way may be older than that, and answers nobody who asks from now on."""
        self._running.pop(key_id, None)

    async def close(self) -> None:
        """End all look-ups, which fail with Unavailable."""
        readers = list(self._readers)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        self._fail_all(self._waiting, cannot_check())

    async def _read_waiting(self) -> None:
        """Read until nothing waits."""
        try:
            while self._waiting:
                if self._gather_s:
                    await asyncio.sleep(self._gather_s)
                await self._read_batch()
        except BaseException:  # a defect, or the end of the process: raised on once those who wait are told
            self._fail_all(self._waiting, cannot_check())
            raise
        finally:  # in the same turn in which it has seen that nothing waits
            self._num_reading -= 1

    async def _read_batch(self) -> None:
        batch = {key_id: self._waiting.pop(key_id) for key_id in list(self._waiting)[: self._max_batch]}
        self._running |= batch
        try:
            found = await self._read(list(batch))
        except Unavailable as error:
            self._paused_until_s = self._clock.monotonic() + self._pause_s
            self._fail_all(batch, error)
            if self._pause_s:
                self._fail_all(self._waiting, error)
        else:
            for key_id, future in batch.items():
                if not future.done():
                    future.set_result(found[key_id])
        finally:
            self._fail_all(batch, cannot_check())  # whatever else has ended it
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
    """Whether the store answers look-ups of keys that exist. It counts as away after a connection that failed, or after
    `max_timeouts` look-ups in a row that were not answered in time, and only where no later one was answered."""

    def __init__(self, clock: Clock, pause_s: float, max_timeouts: int = 2) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._max_timeouts = max_timeouts
        self._num_timeouts = 0
        self._answered_s = float("-inf")  # when the latest look-up that was answered had been asked
        self._paused_until_s = float("-inf")
        self.is_away = False

    @property
    def is_paused(self) -> bool:
        """Whether it failed so lately that it is not asked."""
        return self._clock.monotonic() < self._paused_until_s

    def answered(self, asked_s: float) -> None:
        """A look-up that was asked then has its answer."""
        self._answered_s = max(self._answered_s, asked_s)
        self._num_timeouts = 0
        self.is_away = False

    def failed(self, asked_s: float, *, timed_out: bool) -> bool:
        """Take note of a look-up that failed; whether the store is away since just now."""
        if self._answered_s > asked_s:
            return False
        self._num_timeouts += timed_out
        if timed_out and self._num_timeouts < self._max_timeouts and not self.is_away:
            return False
        was_away, self.is_away = self.is_away, True
        self._paused_until_s = self._clock.monotonic() + self._pause_s
        return not was_away


def cannot_check() -> Unavailable:
    return Unavailable(
        "API keys cannot be checked right now; try again shortly.",
        code="store_unavailable",
        retry_after_s=RETRY_AFTER_S,
    )


def _retrieve(future: asyncio.Future[T]) -> None:
    """Take note of the exception, even if every caller has left."""
    if not future.cancelled():
        future.exception()

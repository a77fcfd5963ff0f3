"""Small data that every request reads from the database, cached as a snapshot that is refreshed when it is old.

A request costs no statement. A snapshot is valid for `ttl_s`, which bounds how long an edit of another gateway goes
unnoticed; a snapshot in use is refreshed before that, so that no request waits for it. An edit through this process
takes effect here at once. When the database is away, or does not answer for `READ_TIMEOUT_S`, the last snapshot remains
in use, because old limits are better than none; without a snapshot, requests fail closed (503).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.clock import Clock
from moiety_platform.db.failures import RETRY_AFTER_S
from moiety_platform.db.session import Database
from moiety_platform.disk_full import store_advice
from moiety_platform.errors import Unavailable

TTL_S = 2.0
REFRESH_SHARE = 0.75  # fraction of the time to live after which a snapshot in use is refreshed
LOOKUP_TIMEOUT_S = 3.0
READ_TIMEOUT_S, READ_TIMEOUT_OUTAGE_S = 0.5, 0.05  # wait for a new snapshot, if there is an old one
OUTAGE_PAUSE_S = 0.5

T = TypeVar("T")

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Snapshot(Generic[T]):
    """Cached snapshot. `what` is its plural name in messages. Owned by the entry point; one event loop."""

    what: str
    load: Callable[[AsyncSession], Awaitable[T]]
    database: Database
    clock: Clock
    _: KW_ONLY
    ttl_s: float = TTL_S

    def __post_init__(self) -> None:
        self._value: T | None = None
        self._read_again_s = self._fresh_until_s = float("-inf")
        self._num_edits = 0
        self._num_edits_seen = -1  # by the current value
        self._reading: asyncio.Task[None] | None = None
        self._asked_s = float("-inf")  # when the current read began
        self._away = False

    def forget(self) -> None:
        """Discard the snapshot after an edit, so that it is read again before the next request is served."""
        self._num_edits += 1
        self._read_again_s = self._fresh_until_s = float("-inf")

    async def current(self) -> T:
        """Return the snapshot. Raises Unavailable when the database is away and was never read."""
        now_s = self.clock.monotonic()
        if now_s >= self._fresh_until_s:
            await self._wait_fresh(self._num_edits)
        elif now_s >= self._read_again_s:
            self._begin_reading()
        if self._value is None:
            raise Unavailable(
                f"{self.what.capitalize()} cannot be read right now; try again shortly.",
                code="store_unavailable",
                retry_after_s=RETRY_AFTER_S,
            )
        return self._value

    async def _wait_fresh(self, num_edits: int) -> None:
        """Wait until the snapshot is fresh and includes `num_edits` edits, or the database does not answer.

        The stale snapshot then remains in use.
        """
        while (now_s := self.clock.monotonic()) >= self._fresh_until_s:
            reading, has_seen = self._begin_reading(), self._num_edits_seen >= num_edits
            timeout_s = max(0.0, self._asked_s + (READ_TIMEOUT_OUTAGE_S if self._away else READ_TIMEOUT_S) - now_s)
            # shared by all callers: the cancellation of one must not cancel it
            done, _ = await asyncio.wait([reading], timeout=timeout_s if has_seen else None)
            if not done or self._away or self._num_edits_seen >= num_edits:
                return

    def _begin_reading(self) -> asyncio.Task[None]:
        if self._reading is None:
            self._asked_s = self.clock.monotonic()
            self._reading = asyncio.create_task(self._read(), name=f"read-{self.what}")
        return self._reading

    async def _read(self) -> None:
        num_edits, asked_at_s = self._num_edits, self.clock.monotonic()
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S), self.database.read_statements() as session:
                value = await self.load(session)
        except (Unavailable, TimeoutError) as error:
            if not self._away:
                reason = str(error) or "the database does not answer in time"
                log.warning("store_unreachable", task=self.what, reason=reason, advice=store_advice(error))
            self._away = True
            self._read_again_s = self._fresh_until_s = self.clock.monotonic() + OUTAGE_PAUSE_S
        else:
            self._away = False
            self._value, self._num_edits_seen = value, num_edits
            if num_edits == self._num_edits:  # otherwise the value may be older than the last edit
                self._read_again_s = asked_at_s + self.ttl_s * REFRESH_SHARE
                self._fresh_until_s = asked_at_s + self.ttl_s
        finally:
            self._reading = None

"""Something small that every request reads from the database: a snapshot that is read again when it is old.

A request costs no statement: what is held is trusted for `ttl_s`, which bounds how long another gateway's edit goes
unnoticed. An edit through this process counts here at once. When the database is away the last snapshot stays good,
since a promise of yesterday is better than none; without any, it fails closed (503).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.clock import Clock
from moiety_platform.db.failures import RETRY_AFTER_S
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable

TTL_S = 2.0
LOOKUP_TIMEOUT_S = 3.0
OUTAGE_PAUSE_S = 0.5

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Snapshot(Generic[T]):
    """`what` is its name in messages, in the plural. Owned by the entry point; one event loop."""

    def __init__(
        self,
        what: str,
        load: Callable[[AsyncSession], Awaitable[T]],
        database: Database,
        clock: Clock,
        *,
        ttl_s: float = TTL_S,
    ) -> None:
        self._what = what
        self._load = load
        self._database = database
        self._clock = clock
        self._ttl_s = ttl_s
        self._value: T | None = None
        self._fresh_until_s = float("-inf")
        self._num_edits = 0
        self._reading: asyncio.Task[int] | None = None
        self._away = False

    def forget(self) -> None:
        """An edit was made: read again before the next request is served."""
        self._num_edits += 1
        self._fresh_until_s = float("-inf")

    async def current(self) -> T:
        """Raises Unavailable when the database is away and was never read."""
        wanted = self._num_edits
        while self._clock.monotonic() >= self._fresh_until_s:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read(), name=f"read-{self._what}")
            num_edits_seen = await asyncio.shield(self._reading)  # shared; a caller that leaves does not take it along
            if self._away or num_edits_seen >= wanted:
                break
        if self._value is None:
            raise Unavailable(
                f"{self._what.capitalize()} cannot be read right now; try again shortly.",
                code="store_unavailable",
                retry_after_s=RETRY_AFTER_S,
            )
        return self._value

    async def _read(self) -> int:
        """The number of edits that what was read has seen for certain."""
        num_edits, asked_at_s = self._num_edits, self._clock.monotonic()
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S), self._database.read() as session:
                value = await self._load(session)
        except (Unavailable, TimeoutError) as error:
            if not self._away:
                reason = str(error) or "the database does not answer in time"
                log.warning("store_away", what=self._what, reason=reason)
            self._away = True
            self._fresh_until_s = self._clock.monotonic() + OUTAGE_PAUSE_S
        else:
            self._away = False
            self._value = value
            if num_edits == self._num_edits:  # else what was read may be older than the last edit
                self._fresh_until_s = asked_at_s + self._ttl_s
        finally:
            self._reading = None
        return num_edits

"""One task of each gateway process that deletes what is past its time: some rows a transaction and a pause after each,
so that on SQLite others get to write, and on PostgreSQL nothing is locked for long.

When the database is away it waits, and finds the same later. A chore that a killed gateway was at is another's once its
lease is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.metrics import RetentionMetrics
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.retention.leases import Now, due, rest, take

LEASE_S = 60.0
PAUSE_S = 0.05
LOOKS_AN_INTERVAL = 4  # so that a chore is done soon after it is due

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RetentionJob:
    """`purge` deletes some of what is past its time, or sums some of it up, within the caller's transaction; how many
    rows or days, 0 once there is nothing left. Whatever it is killed in the middle of, it finds the rest when it is
    called again."""

    name: str
    purge: Callable[[AsyncSession], Awaitable[int]]


class RetentionService:
    """Owned by the entry point; one event loop. Its owner's id must never have been used before."""

    def __init__(
        self,
        owner: str,
        database: Database,
        chores: Sequence[RetentionJob],
        metrics: RetentionMetrics,
        *,
        interval_s: float,
        lease_s: float = LEASE_S,
        pause_s: float = PAUSE_S,
        now: Now = now_ms,
    ) -> None:
        self._owner = owner
        self._database = database
        self.chores = chores  # may be set to others, for the rounds to come
        self._metrics = metrics
        self._interval_s = interval_s
        self._lease_ms = round(lease_s * 1000)
        self._pause_s = pause_s
        self._now = now
        self._rounds = PeriodicTask("retention", self.round, interval_s / LOOKS_AN_INTERVAL)

    def use(self, chores: Sequence[RetentionJob], interval_s: float) -> None:
        """From the next round on, which is made now."""
        self.chores, self._interval_s = chores, interval_s
        self._rounds.every_s = interval_s / LOOKS_AN_INTERVAL
        self._rounds.wake()

    async def start(self) -> None:
        self._rounds.start()

    async def stop(self) -> None:
        """After the transaction that runs. Idempotent."""
        await self._rounds.stop()

    async def round(self) -> dict[str, int]:
        """Do every chore whose turn it is, to its end; how many rows each has deleted. Raises Unavailable."""
        async with self._database.read() as session:
            names = await due(session, [chore.name for chore in self.chores], self._now)
        done = {}
        for chore in self.chores:
            if chore.name in names and not self._rounds.is_stopping:
                done[chore.name] = await self._do(chore)
        return done

    async def _do(self, chore: RetentionJob) -> int:
        """One chore, whose failure keeps none of the others from being done. Raises Unavailable."""
        total = 0
        try:
            while num_rows := await self._step(chore):
                total += num_rows
                self._metrics.observe(chore.name, num_rows)
                await asyncio.sleep(self._pause_s)
                if self._rounds.is_stopping:
                    break
        except Unavailable:
            raise
        except Exception:  # the root of a chore: told, and tried again when its lease is over
            log.exception("retention_failed", chore=chore.name)
            self._metrics.observe_failure(chore.name)
        if total:
            log.info("retention_done", chore=chore.name, rows=total)
        return total

    async def _step(self, chore: RetentionJob) -> int:
        """One transaction; how many rows it has deleted, 0 where there are no more or another gateway is at them."""
        async with self._database.write() as session:
            if not await take(session, chore.name, self._owner, self._lease_ms, self._now):
                return 0
            num_rows = await chore.purge(session)
            if num_rows == 0:
                await rest(session, chore.name, round(self._interval_s * 1000), self._now)
        return num_rows

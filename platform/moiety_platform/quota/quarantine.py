"""Quarantine of expired leases: unspent amounts are freed once engines prove them unspent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.quota.store import LeaseStore

PROOF_MARGIN_S = 5.0  # more than the time from a request's hold to its engine
FORGOTTEN_AFTER = 12  # in sweep intervals: older statistics are not reported

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class QuarantineStats:
    """Statistics of quarantined leases with something left."""

    replicas: int
    leases: int
    oldest_s: float  # how long the replica with the longest silence has been silent


class Quarantine:
    """Quarantine of expired leases, swept by each enforcer.

    `is_proven` returns whether engines hold nothing of a replica that has been silent for a given time; without it
    nothing is freed.
    """

    def __init__(self, database: Database, store: LeaseStore, clock: Clock, *, every_s: float) -> None:
        self.is_proven: Callable[[str, float], bool] | None = None
        self._database = database
        self._store = store
        self._clock = clock
        self._every_s = every_s
        self._swept_s = clock.monotonic()
        self._stats: QuarantineStats | None = None

    def stats(self) -> QuarantineStats | None:
        """Return the statistics of the last sweep; None if it is too old."""
        is_old = self._clock.monotonic() - self._swept_s > FORGOTTEN_AFTER * self._every_s
        return None if is_old else self._stats

    async def sweep(self) -> None:
        """Quarantine expired leases and free what is proven unspent, at most once per interval. Raises Unavailable."""
        now_s = self._clock.monotonic()
        if now_s - self._swept_s < self._every_s:
            return
        self._swept_s = now_s
        async with self._database.write() as session:
            await self._store.quarantine_expired(session)
        async with self._database.write() as session:
            await self._store.release_expired(session)
        await self._release_proven()

    async def _release_proven(self) -> None:
        """Free what dead replicas have left, as soon as the engines' own counts prove it unspent."""
        async with self._database.read() as session:
            found = await self._store.quarantined(session)
        left = dict(found)
        for replica_id, one in found.items():
            if self.is_proven is not None and self.is_proven(replica_id, one.silent_s + PROOF_MARGIN_S):
                async with self._database.write() as session:
                    num_leases = await self._store.release_quarantined(session, replica_id)
                log.info("quarantine_released", replica=replica_id, num_leases=num_leases)
                del left[replica_id]
        oldest_s = max((one.silent_s for one in left.values()), default=0.0)
        self._stats = QuarantineStats(len(left), sum(one.num_leases for one in left.values()), oldest_s)

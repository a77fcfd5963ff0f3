"""The leases of gateway processes that renew them no more: set aside, and free again once engines prove them
unspent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.quota.store import LeaseStore

PROOF_MARGIN_S = 5.0  # more than a request takes from its hold to its engine
FORGOTTEN_AFTER = 12  # times as long as between two sweeps: what was found so long ago is told no more

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class QuarantineStats:
    """What was found in quarantine, with something left."""

    replicas: int
    leases: int
    oldest_s: float  # for how long the one that was silent the longest has been


class Quarantine:
    """Swept by each keeper. `is_proven` says whether engines hold nothing of a replica that has been silent for so
    long; without it nothing is freed."""

    def __init__(self, database: Database, store: LeaseStore, clock: Clock, *, every_s: float) -> None:
        self.is_proven: Callable[[str, float], bool] | None = None
        self._database = database
        self._store = store
        self._clock = clock
        self._every_s = every_s
        self._swept_s = clock.monotonic()
        self._stats: QuarantineStats | None = None

    def stats(self) -> QuarantineStats | None:
        """By the last sweep; None where that was long ago."""
        is_old = self._clock.monotonic() - self._swept_s > FORGOTTEN_AFTER * self._every_s
        return None if is_old else self._stats

    async def sweep(self) -> None:
        """Now and then: does nothing if the last time was just now. Raises Unavailable."""
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
        """What replicas that died have left, as soon as the engines' own counts prove it unspent."""
        async with self._database.read() as session:
            found = await self._store.quarantined(session)
        left = dict(found)
        for replica_id, one in found.items():
            if self.is_proven is not None and self.is_proven(replica_id, one.silent_s + PROOF_MARGIN_S):
                async with self._database.write() as session:
                    num_leases = await self._store.release_quarantined(session, replica_id)
                log.info("quarantine_released", of=replica_id, num_leases=num_leases)
                del left[replica_id]
        oldest_s = max((one.silent_s for one in left.values()), default=0.0)
        self._stats = QuarantineStats(len(left), sum(one.num_leases for one in left.values()), oldest_s)

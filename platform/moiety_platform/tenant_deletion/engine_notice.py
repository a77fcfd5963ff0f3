"""Sends the ids of deleted tenants to the engines and caches, so that none of their data stays in memory or on disks.

The database keeps the list of deleted tenants for good. Each gateway reads it every few seconds and sends it to all
connected engines, and to each engine again after a reconnect: an engine that was down during a deletion, or that
restarted with files on disk, gets it as soon as it can serve requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from sqlalchemy import func, select

from moiety_platform.db.session import Database
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.tenants.models import TenantDeletion

POLL_INTERVAL_S = 2.5  # shorter than a deletion


class TenantDataHolder(Protocol):
    """An engine, or a cache of this process, that holds data of tenants."""

    def forget_tenants(self, tenant_ids: Collection[str]) -> None:
        """Drop the data of all deleted tenants. Never raises."""
        ...


class EngineNotice:
    """Periodic sender. Owned by the entry point; for one event loop.

    `engines` returns the current engines and the caches of this process. `count_deletions` returns the number of all
    deletions, if it is read together with other things.
    """

    def __init__(
        self,
        database: Database,
        engines: Callable[[], Sequence[TenantDataHolder]],
        *,
        every_s: float = POLL_INTERVAL_S,
        count_deletions: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        self._database, self._engines = database, engines
        self._count = count_deletions or self._count_deletions
        self._tenant_ids: list[str] = []
        self._rounds = PeriodicTask("tenant-deletions", self.round, every_s)

    def start(self) -> None:
        """Start, with the first round at once."""
        self._rounds.start()
        self._rounds.wake()

    async def stop(self) -> None:
        await self._rounds.stop()

    def wake(self) -> None:
        """Run a round now, because a deletion has begun."""
        self._rounds.wake()

    async def round(self) -> None:
        """Send the ids of deleted tenants to all engines. Raises Unavailable."""
        if await self._count() != len(self._tenant_ids):  # a deletion is never undone
            async with self._database.read() as session:
                self._tenant_ids = list(await session.scalars(select(TenantDeletion.tenant_id)))
        for engine in self._engines():
            engine.forget_tenants(self._tenant_ids)

    async def _count_deletions(self) -> int:
        async with self._database.read() as session:
            return await session.scalar(select(func.count()).select_from(TenantDeletion)) or 0

"""Tells the engines which tenants were erased, so that nothing of theirs stays in prefix caches, in memory or on disks.

Who is erased stands in the database, for good. Each gateway looks there every few seconds and tells all engines that it
is connected to, and each of them again whenever it comes back: so one that was away when a tenant was erased, or was
restarted over files that it had left, hears of it as soon as it can serve anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import func, select

from moiety_platform.db.session import Database
from moiety_platform.engine_client.base import EngineClient
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.tenants.models import TenantDeletion

LOOK_EVERY_S = 2.5  # less than an erasure takes


class EngineNotice:
    """Owned by the entry point; one event loop. `engines` are those that there are at the moment."""

    def __init__(
        self, database: Database, engines: Callable[[], Sequence[EngineClient]], *, every_s: float = LOOK_EVERY_S
    ) -> None:
        self._database, self._engines = database, engines
        self._tenant_ids: list[str] = []
        self._rounds = PeriodicTask("erasures-told", self.round, every_s)

    def start(self) -> None:
        """And look at once."""
        self._rounds.start()
        self._rounds.wake()

    async def stop(self) -> None:
        await self._rounds.stop()

    def wake(self) -> None:
        """A tenant is being erased."""
        self._rounds.wake()

    async def round(self) -> None:
        """Raises Unavailable."""
        async with self._database.read() as session:
            count = await session.scalar(select(func.count()).select_from(TenantDeletion))
            if count != len(self._tenant_ids):  # an erasure is never taken back
                self._tenant_ids = list(await session.scalars(select(TenantDeletion.tenant_id)))
        for engine in self._engines():
            engine.forget(self._tenant_ids)

"""Pending work of the periodic tasks of a gateway, read from the database in one statement for all.

The tasks of an idle gateway begin their rounds in the same wake-ups. A round without work needs no transaction of its
own, which costs several times as much as its statement.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from sqlalchemy import exists, func, select

from moiety_platform.alerts.models import AlertCondition
from moiety_platform.batches.models import OPEN, Batch
from moiety_platform.db.session import Database
from moiety_platform.quota.models import QuotaThreshold
from moiety_platform.tenants.models import TenantDeletion
from moiety_platform.webhooks.models import DeliveryState, WebhookDelivery

GATHER_S = 0.005  # in which the tasks of one wake-up ask


@dataclass(frozen=True, slots=True)
class PendingWork:
    """State of the database at one moment, as far as the periodic tasks look at it."""

    num_deletions: int  # of tenants, of all time
    has_open_batches: bool
    has_thresholds: bool  # of quotas, which usage can pass
    has_pending_deliveries: bool  # of events to webhooks, due or not
    has_conditions: bool  # that alerts are about


class PendingWorkReader:
    """Reader of the state on which the periodic tasks depend. Owned by the entry point; for one event loop.

    `stop` it before the database is closed.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._statement = select(
            select(func.count()).select_from(TenantDeletion).scalar_subquery(),
            exists(select(Batch.id).where(Batch.status.in_(OPEN))),
            exists(select(QuotaThreshold.quota_id)),
            exists(select(WebhookDelivery.alert_id).where(WebhookDelivery.state == DeliveryState.PENDING)),
            exists(select(AlertCondition.kind)),
        )
        self._next: asyncio.Task[PendingWork] | None = None  # has not begun its transaction
        self._tasks: set[asyncio.Task[PendingWork]] = set()

    async def read(self) -> PendingWork:
        """Return the state after the call. Raises Unavailable."""
        if self._next is None:
            self._next = asyncio.create_task(self._read(), name="pending-work")
            self._tasks.add(self._next)
            self._next.add_done_callback(self._ended)
        return await asyncio.shield(self._next)

    async def num_deletions(self) -> int:
        """Return the number of tenants that were ever deleted. Raises Unavailable."""
        return (await self.read()).num_deletions

    async def has_open_batches(self) -> bool:
        """Return whether a batch has not ended. Raises Unavailable."""
        return (await self.read()).has_open_batches

    async def may_have_alerts(self) -> bool:
        """Return whether usage can pass a threshold, or an event waits to be sent. Raises Unavailable."""
        pending_work = await self.read()
        return pending_work.has_thresholds or pending_work.has_pending_deliveries

    async def has_conditions(self) -> bool:
        """Return whether conditions of alerts are stored. Raises Unavailable."""
        return (await self.read()).has_conditions

    async def stop(self) -> None:
        """Wait for the statements that run. Idempotent."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _read(self) -> PendingWork:
        await asyncio.sleep(GATHER_S)
        self._next = None  # who asks from now on must see what is committed until then
        async with self._database.read_statements() as session:
            num_deletions, *flags = (await session.execute(self._statement)).one()
        return PendingWork(num_deletions, *map(bool, flags))

    def _ended(self, task: asyncio.Task[PendingWork]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # those who asked can have been cancelled

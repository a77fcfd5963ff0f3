"""Maintenance of whole batches: validation, expiry and closing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import structlog

from moiety_platform.batches.claims import OpenBatch, claim_batch
from moiety_platform.batches.closing import EXPIRED, begin_closing, close_batch, fail_unanswered
from moiety_platform.batches.input_import import InputImport
from moiety_platform.batches.line_limits import BatchLineLimits
from moiety_platform.batches.models import BatchStatus
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.files.contents import FileContents
from moiety_platform.files.store import Now

LEASE_S = 60.0
MAX_AT_ONCE = 4  # validations and closings in one process, at most one per tenant

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class BatchMaintenance:
    """Maintenance tasks, owned by the worker, which passes the batches; one event loop.

    They run beside the worker, so that a large file delays no line, and on one batch of a tenant at a time, so that
    many files of one tenant delay no other tenant.
    """

    database: Database
    contents: FileContents
    limits: BatchLineLimits  # may be changed, with effect on later files
    _: KW_ONLY
    lease_s: float = LEASE_S
    now: Now = now_ms
    _tasks: dict[str, asyncio.Task[None]] = field(init=False, default_factory=dict)

    @property
    def _lease_ms(self) -> int:
        return round(self.lease_s * 1000)

    def run_maintenance(self, batches: Sequence[OpenBatch], on_change: Callable[[], None]) -> None:
        """Start the pending work of these batches; `on_change` is called after a task has succeeded."""
        for batch in batches:
            if len(self._tasks) >= MAX_AT_ONCE:
                break
            if batch.tenant_id not in self._tasks and self._needs(batch):
                self._begin(batch.tenant_id, self._run_maintenance(batch), on_change)

    async def stop(self) -> None:
        """Cancel the tasks; another worker repeats unfinished work."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _needs(self, batch: OpenBatch) -> bool:
        if batch.status == BatchStatus.IN_PROGRESS:
            return batch.is_due
        return batch.is_free

    def _begin(self, tenant_id: str, work: Coroutine[Any, Any, None], on_change: Callable[[], None]) -> None:
        async def run() -> None:
            try:
                await work
            except Unavailable as error:
                log.warning(
                    "batch_store_unreachable",
                    reason=str(error),
                    tenant_id=tenant_id,
                    advice="restore the connection to the database; batches continue afterwards",
                )
            except Exception:  # last resort of the task: log it, and retry once its lease is over
                log.exception("batch_maintenance_failed", tenant_id=tenant_id)
            else:
                on_change()
            finally:
                self._tasks.pop(tenant_id, None)

        self._tasks[tenant_id] = asyncio.create_task(run(), name="batch-tending")

    async def _run_maintenance(self, batch: OpenBatch) -> None:
        if batch.is_due and batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            async with self.database.write() as session:
                await begin_closing(session, batch.id, BatchStatus.EXPIRED, EXPIRED, self.now)
            return
        async with self.database.write() as session:
            if not await claim_batch(session, batch, self._lease_ms, self.now):
                return
        input_import = InputImport(self.database, self.contents, batch, self.limits, self._lease_ms, self.now)
        if batch.status == BatchStatus.VALIDATING:
            await input_import.run()
            return
        if batch.is_checked:
            await input_import.add_missing()
        await self._close(batch)

    async def _close(self, batch: OpenBatch) -> None:
        is_done = False
        while not is_done:
            async with self.database.write() as session:
                is_done = await fail_unanswered(session, batch.id)
        async with self.database.write() as session:
            ended_as = await close_batch(session, batch.id, self.now)
        if ended_as is not None:
            log.info("batch_ended", batch_id=batch.id, status=ended_as.value)

"""Deletes a tenant's data in short, repeatable transactions: a call after a kill continues the work.

First the tenant is suspended and its keys are revoked for good. Then objects are deleted, and rows are deleted and
blanked, some at a time, until a whole pass finds nothing more. The deletion ends at the earliest some seconds after its
beginning, when every gateway knows of the revoked keys. A later deletion finds what a request that was then in progress
may have left.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.audit.chain import ERASE
from moiety_platform.audit.models import AuditEntry
from moiety_platform.audit.trail import AuditedStore, Change, note
from moiety_platform.auth.row_scope import rows_of
from moiety_platform.db.dialect import insert_into
from moiety_platform.db.failures import UNMIGRATED
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.object_storage.keys import tenant_prefixes
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.tenant_deletion.data import (
    KEPT_ELSEWHERE,
    Table,
    delete_some,
    forget_objects,
    name_of,
    stop_uploads,
    tables_to_delete,
)
from moiety_platform.tenant_deletion.log import erase_entries
from moiety_platform.tenant_deletion.names import blank_attribution, blank_models, blank_names, blank_receipts
from moiety_platform.tenants.models import ApiKey, Tenant, TenantDeletion, TenantStatus
from moiety_platform.tenants.service import get_tenant

OBJECTS = "objects"  # their name in the counts
HEARD_AFTER = timedelta(seconds=5)  # by then every gateway with access to the database knows of the revocation


@dataclass(frozen=True, slots=True)
class TenantDeleter:
    """Deletion of one tenant's data, by one administrator."""

    store: AuditedStore
    tenant_id: str
    objects: ObjectStore
    traces: Database | None = None  # if it is another database

    async def begin(self) -> list[str]:
        """Suspend the tenant and revoke its keys; return the ids of all of its keys. Raises NotFound."""
        now = self.store.clock.now()
        async with self.store.write() as session:
            tenant = await get_tenant(session, self.tenant_id)
            tenant.status = TenantStatus.SUSPENDED
            keys = (await session.scalars(select(ApiKey).where(rows_of(ApiKey, tenant.id)))).all()
            revoked = [key for key in keys if key.revoked_at is None]
            for key in revoked:
                key.revoked_at = now
            row = {"tenant_id": tenant.id, "begun_at": now, "counts": {"revoked_keys": len(revoked)}}
            await session.execute(insert_into(session, TenantDeletion).values(row).on_conflict_do_nothing())
        return [key.id for key in keys]

    async def work(self, budget_s: float) -> TenantDeletion:
        """Continue for about `budget_s`, or to the end; return the progress. Raises Unavailable."""
        until_s = time.monotonic() + budget_s
        while await self._pass(until_s) and time.monotonic() < until_s:
            pass
        async with self.store.write() as session:
            return await self._end(session, is_done=time.monotonic() < until_s)

    async def _pass(self, until_s: float) -> int:
        """Run one pass over everything, or until the time is over; return the number of rows found."""
        database, found = self.store.database, 0
        async with database.write() as session:
            await stop_uploads(session, self.tenant_id)
        for prefix in tenant_prefixes(self.tenant_id):
            num_objects = -1
            while num_objects and time.monotonic() < until_s:
                num_objects = await self._delete_objects(prefix)
                found += num_objects
            if num_objects:
                return found  # the time is over: rows of objects that are left stay
        async with database.write() as session:
            await forget_objects(session, self.tenant_id)
        for table in tables_to_delete():
            num_rows = -1
            while num_rows and time.monotonic() < until_s:
                num_rows = await self._delete_some(table)
                found += num_rows
        async with database.write() as session:
            found += await self._count(session, await blank_names(session, self.tenant_id))
        for blank in (blank_attribution, blank_receipts):
            num_rows = -1
            while num_rows and time.monotonic() < until_s:
                async with database.write() as session:
                    num_rows = await self._count(session, await blank(session, self.tenant_id))
                found += num_rows
        async with database.write() as session:
            found += await self._count(session, await blank_models(session, self.tenant_id))
        async with self.store.write() as session:
            num_entries = await erase_entries(session, self.tenant_id, self.store.clock.now())
            found += await self._count(session, Counter({AuditEntry.__tablename__: num_entries}))
        return found

    async def _delete_objects(self, prefix: str) -> int:
        """Delete some objects under a prefix, orphaned and unfinished ones included; return their number."""
        num_objects = await self.objects.delete_some(prefix) + await self.objects.remove_unfinished(prefix)
        async with self.store.database.write() as session:
            return await self._count(session, Counter({OBJECTS: num_objects}))

    async def _delete_some(self, table: Table) -> int:
        """Delete some rows of a table, in this database or in that of the traces; return their number."""
        if self.traces is not None and table in KEPT_ELSEWHERE:
            num_rows = await self._delete_traces(self.traces, table)
            async with self.store.database.write() as session:
                return await self._count(session, Counter({name_of(table): num_rows}))
        async with self.store.database.write() as session:
            num_rows = await delete_some(session, table, self.tenant_id)
            return await self._count(session, Counter({name_of(table): num_rows}))

    async def _delete_traces(self, traces: Database, table: Table) -> int:
        try:
            async with traces.write() as session:
                return await delete_some(session, table, self.tenant_id)
        except Unavailable as error:
            if error.code == UNMIGRATED:  # there is no trace store
                return 0
            raise

    async def _count(self, session: AsyncSession, counts: Counter[str]) -> int:
        """Store the counts in the transaction of the counted changes; return their sum.

        Rows found after the end reopen the deletion.
        """
        if counts.total():
            deletion = await session.get_one(TenantDeletion, self.tenant_id, with_for_update=True)
            await self._change(session, counts=dict(Counter(deletion.counts) + counts), ended_at=None)
        return counts.total()

    async def _end(self, session: AsyncSession, *, is_done: bool) -> TenantDeletion:
        deletion = await session.get_one(TenantDeletion, self.tenant_id, with_for_update=True)
        now = self.store.clock.now()
        if is_done and deletion.ended_at is None and now >= deletion.begun_at + HEARD_AFTER:
            await self._change(session, ended_at=now)
            counts = {"tenant_id": self.tenant_id, "counts": deletion.counts}
            note(session, Change(ERASE, Tenant.__tablename__, self.tenant_id, None, counts))
            await session.refresh(deletion)
        return deletion

    async def _change(self, session: AsyncSession, **values: Any) -> None:
        """Bypass the session's objects: the audit log records a deletion in entries of its own."""
        connection = await session.connection()
        await connection.execute(
            update(TenantDeletion).where(TenantDeletion.tenant_id == self.tenant_id).values(values)
        )

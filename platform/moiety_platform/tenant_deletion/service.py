"""Erases a tenant's data, in short transactions that may be repeated: whoever calls again after a kill goes on.

First the tenant is suspended and its keys are revoked, for good. Then rows are deleted and blanked, some at a time,
until a whole pass finds nothing more. That counts as the end only some seconds after the beginning, when every gateway
has heard that the keys are revoked. Erasing again later finds what a request that was open then may have left.
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
from moiety_platform.auth.reach import rows_of
from moiety_platform.db.dialect import insert_into
from moiety_platform.db.failures import UNMIGRATED
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.tenant_deletion.data import KEPT_ELSEWHERE, Table, delete_some, doomed, name_of, stop_growth
from moiety_platform.tenant_deletion.log import erase_entries
from moiety_platform.tenant_deletion.names import blank_models, blank_names
from moiety_platform.tenants.models import ApiKey, Tenant, TenantDeletion, TenantStatus
from moiety_platform.tenants.service import get_tenant

HEARD_AFTER = timedelta(seconds=5)  # by then every gateway that has the database knows of the revocation


@dataclass(frozen=True, slots=True)
class TenantDeleter:
    """Erases what belongs to one tenant, as one administrator."""

    store: AuditedStore
    tenant_id: str
    traces: Database | None = None  # where that is another database

    async def begin(self) -> list[str]:
        """Suspend the tenant and revoke its keys; the ids of all of these. Raises NotFound."""
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
        """Go on for about so long, or to the end; how far it is. Raises Unavailable."""
        until_s = time.monotonic() + budget_s
        while await self._pass(until_s) and time.monotonic() < until_s:
            pass
        async with self.store.write() as session:
            return await self._end(session, is_done=time.monotonic() < until_s)

    async def _pass(self, until_s: float) -> int:
        """Once through everything, unless the time is over before; how many rows were found."""
        database, found = self.store.database, 0
        async with database.write() as session:
            await stop_growth(session, self.tenant_id)
        for table in doomed():
            num_rows = -1
            while num_rows and time.monotonic() < until_s:
                num_rows = await self._delete_some(table)
                found += num_rows
        async with database.write() as session:
            found += await self._count(session, await blank_names(session, self.tenant_id))
        async with database.write() as session:
            found += await self._count(session, await blank_models(session, self.tenant_id))
        async with self.store.write() as session:
            num_entries = await erase_entries(session, self.tenant_id, self.store.clock.now())
            found += await self._count(session, Counter({AuditEntry.__tablename__: num_entries}))
        return found

    async def _delete_some(self, table: Table) -> int:
        """Of a table in this database, or of one in that of the traces; how many rows."""
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
            if error.code == UNMIGRATED:  # nobody keeps traces here
                return 0
            raise

    async def _count(self, session: AsyncSession, counts: Counter[str]) -> int:
        """Keep the counts with what they count; their sum. A finding after the end begins the erasure anew."""
        if counts.total():
            erasure = await session.get_one(TenantDeletion, self.tenant_id, with_for_update=True)
            await self._change(session, counts=dict(Counter(erasure.counts) + counts), ended_at=None)
        return counts.total()

    async def _end(self, session: AsyncSession, *, is_done: bool) -> TenantDeletion:
        erasure = await session.get_one(TenantDeletion, self.tenant_id, with_for_update=True)
        now = self.store.clock.now()
        if is_done and erasure.ended_at is None and now >= erasure.begun_at + HEARD_AFTER:
            await self._change(session, ended_at=now)
            counts = {"tenant_id": self.tenant_id, "counts": erasure.counts}
            note(session, Change(ERASE, Tenant.__tablename__, self.tenant_id, None, counts))
            await session.refresh(erasure)
        return erasure

    async def _change(self, session: AsyncSession, **values: Any) -> None:
        """Past the session's objects: the log tells of an erasure in entries of its own."""
        connection = await session.connection()
        await connection.execute(
            update(TenantDeletion).where(TenantDeletion.tenant_id == self.tenant_id).values(values)
        )

"""Deletion of whole rows: files, batches with their lines and answers, and every table that is not listed here as kept.

It runs within the caller's transaction, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, CursorResult, delete, exists, inspect, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.adapters.models import Adapter, AdapterChunk, AdapterState
from moiety_platform.audit.models import AuditEntry
from moiety_platform.auth.row_scope import rows_of
from moiety_platform.batches.models import OPEN, Batch, BatchLine, BatchStatus
from moiety_platform.db.base import Base, DeploymentTable, SharedTable
from moiety_platform.files.models import FileChunk, FileState, StoredFile
from moiety_platform.quota.models import Quota, QuotaAlert, QuotaLease, QuotaRate, QuotaThreshold, QuotaWindow
from moiety_platform.receipts.models import ReceiptChain, ReceiptRecord
from moiety_platform.tenants.models import ApiKey, Project, Tenant, TenantDeletion
from moiety_platform.trace_store.models import SpanRecord, TraceRecord
from moiety_platform.usage.models import (
    AttributedSpan,
    AttributedSum,
    LedgerEntry,
    UsageCut,
    UsageDay,
    UsageHour,
    UsageRecord,
)

Table = type[Base]

ROWS_AT_ONCE = 500
_ROWS_AT_ONCE: Mapping[Table, int] = MappingProxyType({FileChunk: 64, AdapterChunk: 16})  # of 256 KiB and 1 MiB each

_NUMBERS: frozenset[Table] = frozenset(
    {UsageRecord, LedgerEntry, UsageHour, UsageDay, UsageCut, AttributedSum, AttributedSpan}
) | frozenset({Quota, QuotaWindow, QuotaLease, QuotaRate, QuotaThreshold, QuotaAlert, ReceiptChain})
_BLANKED: frozenset[Table] = frozenset(
    {Tenant, Project, ApiKey, AuditEntry, UsageRecord, UsageHour, UsageDay, AttributedSum, ReceiptRecord}
)
KEPT_ELSEWHERE: frozenset[Table] = frozenset({SpanRecord, TraceRecord})  # if traces have their own database
KEPT: frozenset[Table] = _NUMBERS | _BLANKED | {TenantDeletion}


async def stop_uploads(session: AsyncSession, tenant_id: str) -> None:
    """Stop additions to the existing files, adapters and batches. Waits for additions that are under way."""
    adapters = Adapter.tenant_id == tenant_id, Adapter.state != AdapterState.DELETED
    await session.execute(update(Adapter).where(*adapters).values(state=AdapterState.DELETED))
    files = StoredFile.tenant_id == tenant_id, StoredFile.state != FileState.DELETED
    await session.execute(update(StoredFile).where(*files).values(state=FileState.DELETED))
    batches = Batch.tenant_id == tenant_id, Batch.status.in_(OPEN)
    await session.execute(update(Batch).where(*batches).values(status=BatchStatus.CANCELLED))


async def forget_objects(session: AsyncSession, tenant_id: str) -> None:
    """Record that the objects of the tenant's files and adapters are deleted, so that their rows can be deleted."""
    for table in (StoredFile, Adapter):
        deleted = table.tenant_id == tenant_id, table.state == FileState.DELETED, table.object_key.is_not(None)
        await session.execute(update(table).where(*deleted).values(object_key=None))


def tables_to_delete() -> list[Table]:
    """Return the tables whose rows are deleted; tables whose rows are found through others come first."""
    tables = {mapper.class_ for mapper in Base.registry.mappers} - KEPT
    owned = (table for table in tables if not issubclass(table, SharedTable | DeploymentTable))
    return sorted(owned, key=lambda table: ("tenant_id" in table.__mapper__.columns, table.__tablename__))


async def delete_some(session: AsyncSession, table: Table, tenant_id: str) -> int:
    """Delete some of the tenant's rows, except objects that still grow or have parts; return their number."""
    key = inspect(table).primary_key
    condition = rows_of(table, tenant_id), *_WHOLE.get(table, ())
    wanted = select(*key).where(*condition).limit(_ROWS_AT_ONCE.get(table, ROWS_AT_ONCE))
    connection = await session.connection()
    result: CursorResult[Any] = await connection.execute(delete(table).where(tuple_(*key).in_(wanted)))
    return result.rowcount


_WHOLE: Mapping[Table, tuple[ColumnElement[bool], ...]] = MappingProxyType(
    {  # a part that is added later would have no owner
        Adapter: (
            Adapter.state == AdapterState.DELETED,
            Adapter.object_key.is_(None),
            ~exists().where(AdapterChunk.adapter_id == Adapter.id),
        ),
        StoredFile: (
            StoredFile.state == FileState.DELETED,
            StoredFile.object_key.is_(None),
            ~exists().where(FileChunk.file_id == StoredFile.id),
        ),
        Batch: (Batch.status.not_in(OPEN), ~exists().where(BatchLine.batch_id == Batch.id)),
    }
)


def name_of(table: Any) -> str:
    """Return the table's name in the counts."""
    return str(table.__tablename__)

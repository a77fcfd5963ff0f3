"""Export of past days of usage to the object store, one file a day. A retention job runs it, on one gateway at a time.

A day is exported once its sums are made, some hours after its end. The file is complete in the store before its row is
written; after a kill in between, the next run writes the same file again under the same key. A day whose sums have
changed since, because of a late row or a correction, is written again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog
from sqlalchemy import BigInteger, cast, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.dialect import insert_into
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.files.store import read_clock
from moiety_platform.object_storage.store import ObjectStore, WrittenObject
from moiety_platform.retention.leases import Now
from moiety_platform.tenants.models import ApiKey, Project, Tenant
from moiety_platform.usage.days import DAY, day_of
from moiety_platform.usage.models import IS_QUOTED, UsageDay, UsageDayMark, UsageRecord
from moiety_platform.usage.reconciliation import take_snapshot_locks
from moiety_platform.usage_exports.files import ExportFormat, encode
from moiety_platform.usage_exports.focus import CreditsByKeys, DayUsage, UsageKeys, rows_of
from moiety_platform.usage_exports.models import UsageExport

FOLDER = "exports/usage/"
PIECE_BYTES = 1024 * 1024

_KEYS = (UsageDay.tenant_id, UsageDay.project_id, UsageDay.key_id, UsageDay.model, UsageDay.service_class)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DaySums:
    """Sums of a day, by which a change after its export is found. Tokens are those of prompts and outputs."""

    num_rows: int
    requests: int
    tokens: int
    cost_nanodollars: int


@dataclass(frozen=True, slots=True)
class UsageExports:
    """Exporter of one gateway process. `num_days` are the past days that are looked at."""

    database: Database
    objects: ObjectStore
    file_format: ExportFormat
    num_days: int
    now: Now = now_ms

    async def export_next(self) -> int:
        """Export the first day that is not exported as it is now; return 1, or 0 if there is none.

        Raises Unavailable while a store is away.
        """
        async with self.database.read() as session:
            await take_snapshot_locks(session)
            at = datetime.fromtimestamp(await read_clock(session, self.now) / 1000, UTC)
            found = await self._next(session, at)
            if found is None:
                return 0
            day, sums = found
            usage = await _usage_of(session, day)
            names = await _names_of(session, usage)
            credited = await _credits_of(session, day)
        key = key_of(day, self.file_format)
        data = await asyncio.to_thread(lambda: encode(self.file_format, rows_of(day, usage, names, credited)))
        written = await self._write(key, data)
        async with self.database.write() as session:
            await self._note(session, day, key, written, sums, at)
        log.info("usage_exported", day=f"{day:%Y-%m-%d}", key=key, rows=len(usage), bytes=written.num_bytes)
        return 1

    async def _next(self, session: AsyncSession, at: datetime) -> tuple[datetime, DaySums] | None:
        """Return the first finished day whose sums are not those of its export, with these sums."""
        first = day_of(at) - timedelta(days=self.num_days)
        done = select(UsageDayMark.day).where(UsageDayMark.is_done, UsageDayMark.day >= first)
        requests, cost = func.sum(UsageDay.requests), func.sum(UsageDay.cost_nanodollars)
        tokens = func.sum(UsageDay.prompt_tokens + UsageDay.output_tokens)
        sums = [func.count(), *(cast(one, BigInteger) for one in (requests, tokens, cost))]
        days = select(UsageDay.day, *sums).where(UsageDay.day.in_(done)).group_by(UsageDay.day).order_by(UsageDay.day)
        exports = select(UsageExport).where(UsageExport.format == self.file_format, UsageExport.day >= first)
        known = {
            one.day: DaySums(one.num_rows, one.requests, one.tokens, one.cost_nanodollars)
            for one in await session.scalars(exports)
        }
        for day, *amounts in await session.execute(days):
            current = DaySums(*amounts)
            if known.get(day) != current:
                return day, current
        return None

    async def _write(self, key: str, data: bytes) -> WrittenObject:
        writer = self.objects.begin_object(key)
        try:
            for start in range(0, len(data), PIECE_BYTES):
                await writer.write(data[start : start + PIECE_BYTES])
            return await writer.finish()
        finally:
            writer.abort()

    async def _note(
        self,
        session: AsyncSession,
        day: datetime,
        key: str,
        written: WrittenObject,
        sums: DaySums,
        at: datetime,
    ) -> None:
        values = {
            "object_key": key,
            "digest": written.digest,
            "num_bytes": written.num_bytes,
            "num_rows": sums.num_rows,
            "requests": sums.requests,
            "tokens": sums.tokens,
            "cost_nanodollars": sums.cost_nanodollars,
            "exported_at": at,
        }
        insert = insert_into(session, UsageExport).values(day=day, format=self.file_format, **values)
        await session.execute(
            insert.on_conflict_do_update(index_elements=[UsageExport.day, UsageExport.format], set_=values)
        )


def key_of(day: datetime, file_format: ExportFormat) -> str:
    """Return the key of a day's file, such as exports/usage/csv/2026-11/usage-2026-11-30.csv."""
    return f"{FOLDER}{file_format}/{day:%Y-%m}/usage-{day:%Y-%m-%d}.{file_format}"


async def _usage_of(session: AsyncSession, day: datetime) -> list[DayUsage]:
    """Return the usage of a day, ordered by its keys."""
    columns = [getattr(UsageDay, name) for name in DayUsage.__dataclass_fields__]
    found = await session.execute(select(*columns).where(UsageDay.day == day).order_by(*_KEYS))
    return [DayUsage(*row) for row in found]


async def _credits_of(session: AsyncSession, day: datetime) -> CreditsByKeys:
    """Return the credits of a day's requests whose rows are kept."""
    keys = [getattr(UsageRecord, column.key) for column in _KEYS]
    amount = cast(func.sum(UsageRecord.credit_nanodollars), BigInteger)
    found = (
        select(*keys, UsageRecord.credit_reason, amount)
        .where(
            UsageRecord.started_at >= day,
            UsageRecord.started_at < day + DAY,
            literal_column(f"({IS_QUOTED})"),  # without a type, for the reason of UsageFilter.row_conditions
            UsageRecord.credit_nanodollars > 0,
            UsageRecord.credit_reason.is_not(None),
        )
        .group_by(*keys, UsageRecord.credit_reason)
    )
    credited: dict[UsageKeys, dict[str, int]] = {}
    for *ids, reason, nanodollars in await session.execute(found):
        tenant_id, project_id, key_id, model, service_class = ids
        credited.setdefault((tenant_id, project_id, key_id, model, service_class), {})[reason] = nanodollars
    return credited


async def _names_of(session: AsyncSession, usage: Sequence[DayUsage]) -> dict[str, str]:
    """Return the names of the tenants, projects and keys by id."""
    names: dict[str, str] = {}
    for table, field in ((Tenant, "tenant_id"), (Project, "project_id"), (ApiKey, "key_id")):
        ids = sorted({getattr(one, field) for one in usage})
        for start in range(0, len(ids), 500):
            found = select(table.id, table.name).where(table.id.in_(ids[start : start + 500]))
            names.update((one_id, name) for one_id, name in await session.execute(found))
    return names

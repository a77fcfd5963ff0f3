"""Blanking of names that the tenant chose: its own, of projects, keys, end users and tags, and of unserved models.

It runs within the caller's transaction.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

from sqlalchemy import Boolean, CursorResult, and_, delete, literal_column, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.row_scope import rows_of
from moiety_platform.db.dialect import insert_into
from moiety_platform.prices.models import PriceRecord
from moiety_platform.receipts.models import ReceiptRecord
from moiety_platform.tenants.models import ApiKey, Project, Tenant
from moiety_platform.tenants.names import replace_names
from moiety_platform.usage.attributed_sums import blank_sums
from moiety_platform.usage.days import DAY, day_of, unmark
from moiety_platform.usage.models import IS_ATTRIBUTED, AttributedSum, UsageHour, UsageRecord

ERASED = "erased"
HOURS_AT_ONCE = 20
ROWS_AT_ONCE = 500

_KEYS = tuple(column.name for column in UsageHour.__table__.primary_key)
_SUMS = tuple(column.name for column in UsageHour.__table__.columns if column.name not in _KEYS)


async def blank_names(session: AsyncSession, tenant_id: str) -> Counter[str]:
    """Blank the names; return the number of rows by table."""
    counts: Counter[str] = Counter()
    counts[Tenant.__tablename__] = await replace_names(session, Tenant, [rows_of(Tenant, tenant_id)])
    counts[Project.__tablename__] = await replace_names(session, Project, [rows_of(Project, tenant_id)])
    identifying = or_(ApiKey.name != ERASED, ApiKey.hint != "", ApiKey.allowed_models.is_not(None))
    blank = {"name": ERASED, "hint": "", "allowed_models": None}
    changed = update(ApiKey).where(rows_of(ApiKey, tenant_id), identifying).values(blank)
    counts[ApiKey.__tablename__] = await _change(session, changed)
    return counts


async def blank_attribution(session: AsyncSession, tenant_id: str) -> Counter[str]:
    """Blank end users and tags of some usage rows and of some sums by them; return the number of rows by table."""
    told = UsageRecord.tenant_id == tenant_id, literal_column(f"({IS_ATTRIBUTED})", Boolean)
    some = select(UsageRecord.request_id).where(*told).limit(ROWS_AT_ONCE)
    blank = update(UsageRecord).where(UsageRecord.request_id.in_(some)).values(end_user=None, tags=None)
    rows, sums = await _change(session, blank), await blank_sums(session, [tenant_id])
    return Counter({UsageRecord.__tablename__: rows, AttributedSum.__tablename__: sums})


async def blank_receipts(session: AsyncSession, tenant_id: str) -> Counter[str]:
    """Blank contents and salts of some receipts; return their number. Their numbers and hashes stay."""
    told = ReceiptRecord.tenant_id == tenant_id, ReceiptRecord.content.is_not(None)
    some = select(ReceiptRecord.sequence).where(*told).limit(ROWS_AT_ONCE)
    chosen = ReceiptRecord.tenant_id == tenant_id, ReceiptRecord.sequence.in_(some)
    blank = update(ReceiptRecord).where(*chosen).values(content=None, salt=None)
    return Counter({ReceiptRecord.__tablename__: await _change(session, blank)})


async def blank_models(session: AsyncSession, tenant_id: str) -> Counter[str]:
    """Blank model names that the sender of a request made up; return the number of rows by table.

    A model name in usage rows counts as made up if no request for it ever produced output and it has no price. Each
    call handles some hours, in their rows and in their sums.
    """
    served = select(UsageHour.model).where(UsageHour.output_tokens > 0)
    made_up = (
        UsageHour.tenant_id == tenant_id,
        UsageHour.model.not_in(("", ERASED)),
        UsageHour.model.not_in(served),
        UsageHour.model.not_in(select(PriceRecord.model)),
    )
    in_order = [getattr(UsageHour, name) for name in _KEYS]
    soon = select(UsageHour.hour).where(*made_up).order_by(*in_order).limit(HOURS_AT_ONCE)
    days = {day_of(hour) for hour in await session.scalars(soon)}
    counts: Counter[str] = Counter()
    if not days:
        return counts
    await unmark(session, days)  # before their hours are locked, the same order as everywhere
    of_days = or_(*(and_(UsageHour.hour >= day, UsageHour.hour < day + DAY) for day in days))
    found = select(UsageHour).where(*made_up, of_days).order_by(*in_order).limit(HOURS_AT_ONCE)
    for hour in (await session.scalars(found.with_for_update())).all():
        counts[UsageRecord.__tablename__] += await _rename_rows(session, hour)
        counts[AttributedSum.__tablename__] += await _rename_sums(session, hour)
        await _move_sums(session, hour)
        counts[UsageHour.__tablename__] += 1
    return counts


async def _rename_rows(session: AsyncSession, hour: UsageHour) -> int:
    same = [getattr(UsageRecord, name) == getattr(hour, name) for name in _KEYS if name != "hour"]
    within = UsageRecord.started_at >= hour.hour, UsageRecord.started_at < hour.hour + timedelta(hours=1)
    return await _change(session, update(UsageRecord).where(*same, *within).values(model=ERASED))


async def _rename_sums(session: AsyncSession, hour: UsageHour) -> int:
    """Rename the model in the sums by end user of the hour's day, of which each span is a part."""
    day, table = day_of(hour.hour), AttributedSum
    same = [getattr(table, name) == getattr(hour, name) for name in _KEYS if name != "hour"]
    within = table.start >= day, table.start < day + DAY
    return await _change(session, update(table).where(*same, *within).values(model=ERASED))


async def _move_sums(session: AsyncSession, hour: UsageHour) -> None:
    """Add the sums to those of the same hour under the placeholder name of all these models."""
    values = {name: getattr(hour, name) for name in (*_KEYS, *_SUMS)} | {"model": ERASED}
    await session.execute(delete(UsageHour).where(*(getattr(UsageHour, name) == getattr(hour, name) for name in _KEYS)))
    added = insert_into(session, UsageHour).values(values)
    sums = {name: getattr(UsageHour, name) + added.excluded[name] for name in _SUMS}
    await session.execute(added.on_conflict_do_update(index_elements=_KEYS, set_=sums))


async def _change(session: AsyncSession, statement: Any) -> int:
    """Execute an update that bypasses the session's objects; return the number of changed rows."""
    connection = await session.connection()
    result: CursorResult[Any] = await connection.execute(statement)
    return result.rowcount

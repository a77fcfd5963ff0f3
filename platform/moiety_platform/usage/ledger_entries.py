"""Ledger of what was billed, entry by entry, and its hourly sums. Within the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import BigInteger, cast, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.bulk import BulkInsert
from moiety_platform.usage.attributed_spans import invalidate_span
from moiety_platform.usage.days import unmark_late
from moiety_platform.usage.models import EntryKind, LedgerEntry, UsageHour
from moiety_platform.usage.row import UsageRow
from moiety_platform.usage.sums import UsageSums

COUNTS = 1_000_000  # an answer's n-th count is entered under its number plus n times this


def _hour_of(row: UsageRow) -> tuple[Any, ...]:
    hour = row.started_at.replace(minute=0, second=0, microsecond=0)
    return hour, row.tenant_id, row.project_id, row.key_id, row.model, row.service_class


HOURS = UsageSums(UsageHour, _hour_of)  # a request counts in the hour in which it started

_enter_new = BulkInsert(LedgerEntry, lambda insert: insert.on_conflict_do_nothing())


async def settle(session: AsyncSession, rows: Sequence[UsageRow]) -> set[str]:
    """Enter the requests that were not entered before; return their ids. The caller adds them to the sums.

    Nearly always all are new, which the row count shows. If only some are, each half is tried separately.
    """
    if not rows:
        return set()
    async with session.begin_nested() as attempt:
        num_new = await _enter_new(session, list(map(_entry_of, rows)))
        if num_new == len(rows):
            return {row.request_id for row in rows}
        if num_new == 0:
            return set()
        await attempt.rollback()
    middle = len(rows) // 2
    return await settle(session, rows[:middle]) | await settle(session, rows[middle:])


def _entry_of(row: UsageRow) -> tuple[Any, ...]:
    return (
        row.request_id,
        EntryKind.SETTLED.value if row.is_request else EntryKind.SPECULATIVE.value,
        0,
        row.tenant_id,
        row.started_at,
        row.prompt_tokens,
        row.cached_tokens,
        row.output_tokens,
        row.cost_nanodollars + row.credit_nanodollars,
    )


async def enter_credits(session: AsyncSession, rows: Sequence[UsageRow]) -> None:
    """Enter the credits of requests that were just entered: a negative cost each, once per request."""
    credited = [row for row in rows if row.credit_nanodollars]
    if credited:
        await _enter_new(session, [_credit_of(row, row.credit_nanodollars) for row in credited])


def _credit_of(row: UsageRow, credit_nanodollars: int) -> tuple[Any, ...]:
    kind = EntryKind.CREDITED.value
    return row.request_id, kind, 0, row.tenant_id, row.started_at, 0, 0, 0, -credit_nanodollars


async def add_to_hours(session: AsyncSession, rows: Sequence[UsageRow], less: Sequence[UsageRow] = ()) -> None:
    """Add requests to the sums of their hours, and subtract those in `less`."""
    await unmark_late(session, (row.started_at for row in (*rows, *less)))
    await HOURS.add(session, rows, less)


async def metered_before(session: AsyncSession, request_id: str, sequence: int) -> tuple[int, int]:
    """Return how often an answer's count was entered, and the sum of its output tokens. The request's row is locked."""
    same = (
        LedgerEntry.request_id == request_id,
        LedgerEntry.kind == EntryKind.METERED,
        LedgerEntry.sequence % COUNTS == sequence,
    )
    sums = select(func.count(), cast(func.coalesce(func.sum(LedgerEntry.output_tokens), 0), BigInteger)).where(*same)
    count, tokens = (await session.execute(sums)).one()
    return count, tokens


async def correct(session: AsyncSession, kind: EntryKind, sequence: int, before: UsageRow, after: UsageRow) -> None:
    """Enter the change of a request's bill and of its credit, and change the sums. The request's row is locked.

    Raises IntegrityError for a second credit of the request.
    """
    credit = after.credit_nanodollars - before.credit_nanodollars
    entry = insert(LedgerEntry).values(
        request_id=before.request_id,
        kind=kind,
        sequence=sequence,
        tenant_id=before.tenant_id,
        started_at=before.started_at,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        cached_tokens=after.cached_tokens - before.cached_tokens,
        output_tokens=after.output_tokens - before.output_tokens,
        cost_nanodollars=after.cost_nanodollars - before.cost_nanodollars + credit,
    )
    await session.execute(entry)
    if credit:
        await session.execute(insert(LedgerEntry).values(_credit_of(before, credit)))
    await invalidate_span(session, before.tenant_id, before.started_at)
    await add_to_hours(session, [after], [before])

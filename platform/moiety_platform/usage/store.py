"""Storage of usage rows in the table."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.bulk import BulkInsert
from moiety_platform.quota.kinds import LimitKind, Unit
from moiety_platform.quota.lease import Charge
from moiety_platform.quota.models import Quota
from moiety_platform.quota.store import book, lease_covers
from moiety_platform.receipts.chain_store import append_receipts
from moiety_platform.usage.ledger_entries import add_to_hours, correct, enter_credits, settle
from moiety_platform.usage.minutes import MINUTES
from moiety_platform.usage.models import EntryKind, UsageRecord
from moiety_platform.usage.row import GATEWAY_KILLED, NOT_COLUMNS, UsageRow

_FIELDS = tuple(name for name in UsageRow.__struct_fields__ if name not in NOT_COLUMNS)
_columns_of = attrgetter(*(column.name for column in UsageRecord.__table__.columns))
_insert_usage = BulkInsert(UsageRecord)


async def insert_rows(session: AsyncSession, rows: Sequence[UsageRow]) -> None:
    """Enter the rows in the ledger, each `request_id` once, add them to the table, and book their charges.

    Requests that asked for a receipt get it in the same transaction.

    A row that is already in the ledger, or twice in the batch, is left unchanged and charges nothing.
    """
    rows = [await _unless_released(session, row) if row.error_code == GATEWAY_KILLED else row for row in rows]
    first = {row.request_id: row for row in reversed(rows)}
    new_ids = await settle(session, list(first.values()))
    new = [row for row in first.values() if row.request_id in new_ids]
    if new:
        await enter_credits(session, new)
        await _insert_usage(session, [_columns_of(row) for row in new])
        await add_to_hours(session, new)
        await MINUTES.add(session, new)
    charges = [charge for row in new for charge in row.charges]
    known = [row for row in first.values() if row.error_code != GATEWAY_KILLED and row.request_id not in new_ids]
    charges += await _replace_killed(session, known) if known else []
    await book(session, charges)
    asking = [row for row in reversed(first.values()) if row.receipt is not None]  # in the order of the batch
    if asking:
        await append_receipts(session, asking)


async def change_row(session: AsyncSession, row: UsageRow) -> None:
    """Replace the stored row of the request by this one."""
    values = {name: value for name, value in _to_values(row).items() if name != "request_id"}
    await session.execute(update(UsageRecord).where(UsageRecord.request_id == row.request_id).values(values))


async def _replace_killed(session: AsyncSession, rows: Sequence[UsageRow]) -> list[Charge]:
    """Replace the rows of requests whose gateway was wrongly considered dead; return the additional charges.

    The gateway's own row counts instead of the stored one.
    """
    by_id = {row.request_id: row for row in rows}
    killed = (
        select(UsageRecord)
        .where(UsageRecord.request_id.in_(by_id), UsageRecord.error_code == GATEWAY_KILLED)
        .order_by(UsageRecord.request_id)
        .with_for_update()
    )
    charges: list[Charge] = []
    for stored in (await session.scalars(killed, execution_options={"populate_existing": True})).all():
        before, after = row_of(stored), by_id[stored.request_id]
        await correct(session, EntryKind.CORRECTED, 0, before, after)
        await change_row(session, after)
        charges += await _beyond(session, before, after)
    return charges


async def _beyond(session: AsyncSession, before: UsageRow, after: UsageRow) -> list[Charge]:
    """Return the charges of `after` beyond those of `before`: the difference in tokens and in money.

    The request itself was counted already.
    """
    tokens = after.prompt_tokens + after.output_tokens - before.prompt_tokens - before.output_tokens
    more = {Unit.TOKENS: tokens, Unit.MONEY: after.cost_nanodollars - before.cost_nanodollars}
    found = []
    for charge in after.charges:
        quota = await session.get(Quota, charge.window.quota_id)
        amount = more.get(LimitKind(quota.kind).unit, 0) if quota is not None else 0
        if amount:
            found.append(msgspec.structs.replace(charge, amount=amount))
    return found


async def _unless_released(session: AsyncSession, row: UsageRow) -> UsageRow:
    """Return the row of a killed gateway, free of charge if its leases were released meanwhile.

    The gateway wrote it down before the request was served; a release means that the engines have proven that no engine
    had the request.
    """
    if await lease_covers(session, row.charges):
        return row
    return msgspec.structs.replace(row, prompt_tokens=0, cost_nanodollars=0, charges=())


def row_of(record: UsageRecord) -> UsageRow:
    """Return the row of a record, without charges."""
    return UsageRow(**{name: getattr(record, name) for name in _FIELDS})


def _to_values(row: UsageRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _FIELDS}

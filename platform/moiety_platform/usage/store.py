"""Storage of usage rows in the table, and sanitizing of their values."""

from __future__ import annotations

import functools
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
from moiety_platform.quota.store import book, have_room
from moiety_platform.usage.ledger import add_to_hours, correct, settle
from moiety_platform.usage.minutes import MINUTES
from moiety_platform.usage.models import EntryKind, UsageRecord
from moiety_platform.usage.row import GATEWAY_KILLED, UsageRow

MAX_TEXT_LENGTH = 256

_FIELDS = tuple(name for name in UsageRow.__struct_fields__ if name != "charges")
_MOST = 2**48  # limit, so that sums also fit into the database's types
_INT32_MAX = 2**31 - 1
_INT32_FIELDS = frozenset({"http_status", "num_choices", "num_preemptions"})
_names_of = attrgetter(
    "tenant_id", "project_id", "key_id", "endpoint", "model", "service_class", "outcome", "error_code"
)
_numbers_of = attrgetter(
    "http_status",
    "num_choices",
    "num_preemptions",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "cost_nanodollars",
    "speculative_tokens",
    "speculative_used_tokens",
)
_columns_of = attrgetter(*(column.name for column in UsageRecord.__table__.columns))
_insert_usage = BulkInsert(UsageRecord)


async def insert_rows(session: AsyncSession, rows: Sequence[UsageRow]) -> None:
    """Enter the rows in the ledger, each `request_id` once, add them to the table, and book their charges.

    A row that is already in the ledger, or twice in the batch, is left unchanged and charges nothing.
    """
    rows = [await _unless_released(session, row) if row.error_code == GATEWAY_KILLED else row for row in rows]
    first = {row.request_id: row for row in reversed(rows)}
    new_ids = await settle(session, list(first.values()))
    new = [row for row in first.values() if row.request_id in new_ids]
    if new:
        await _insert_usage(session, [_columns_of(row) for row in new])
        await add_to_hours(session, new)
        await MINUTES.add(session, new)
    charges = [charge for row in new for charge in row.charges]
    known = [row for row in first.values() if row.error_code != GATEWAY_KILLED and row.request_id not in new_ids]
    charges += await _replace_killed(session, known) if known else []
    await book(session, charges)


async def change_row(session: AsyncSession, row: UsageRow) -> None:
    """Replace the stored row of the request by this one."""
    values = {name: value for name, value in _to_values(row).items() if name != "request_id"}
    await session.execute(update(UsageRecord).where(UsageRecord.request_id == row.request_id).values(values))


async def _replace_killed(session: AsyncSession, rows: Sequence[UsageRow]) -> list[Charge]:
    """Replace the rows of requests whose gateway was wrongly taken for dead; return the additional charges.

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
    if await have_room(session, row.charges):
        return row
    return msgspec.structs.replace(row, prompt_tokens=0, cost_nanodollars=0, charges=())


def storable(row: UsageRow) -> UsageRow:
    """Return the row with values that every database accepts.

    It replaces NUL and lone surrogates in texts, over-long texts, and numbers that are not finite or too large. Any
    other row is returned unchanged.
    """
    name, numbers = row.request_id, _numbers_of(row)
    times = row.queue_ms or 0.0, row.ttft_ms or 0.0, row.duration_ms or 0.0
    is_storable = (  # few and cheap checks, since each row is checked twice
        name.isascii()
        and name.isprintable()
        and len(name) <= MAX_TEXT_LENGTH
        and _are_plain_names(*_names_of(row))
        and min(numbers) >= 0
        and max(numbers) <= _INT32_MAX
        and min(times) >= 0.0
        and sum(times) <= _MOST  # false if one of the times is NaN
    )
    if is_storable:
        return row
    changes: dict[str, Any] = {}
    for name in _FIELDS:
        value = getattr(row, name)
        clean = _clean(name, value)
        if clean is not value:
            changes[name] = clean
    return msgspec.structs.replace(row, **changes) if changes else row


@functools.lru_cache(maxsize=4096)
def _are_plain_names(*names: str | None) -> bool:
    """Return whether the names are plain; cached, since many requests share them."""
    return _are_plain(*names)


def _are_plain(*texts: str | None) -> bool:
    given = [text for text in texts if text]
    whole = "".join(given)
    return whole.isascii() and whole.isprintable() and max(map(len, given), default=0) <= MAX_TEXT_LENGTH


def row_of(record: UsageRecord) -> UsageRow:
    """Return the row of a record, without charges."""
    return UsageRow(**{name: getattr(record, name) for name in _FIELDS})


def _to_values(row: UsageRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _FIELDS}


def _clean(name: str, value: Any) -> Any:
    if isinstance(value, str):
        if value.isascii() and value.isprintable() and len(value) <= MAX_TEXT_LENGTH:
            return value
        whole = value[:MAX_TEXT_LENGTH].encode("utf-8", "replace").decode()
        return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in whole)
    if isinstance(value, float) and not abs(value) <= _MOST:  # also NaN
        return 0.0 if name == "duration_ms" else None
    if isinstance(value, int):
        bound = _INT32_MAX if name in _INT32_FIELDS else _MOST
        return value if -bound <= value <= bound else min(max(value, -bound), bound)
    return value

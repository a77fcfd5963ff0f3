"""Many rows are read and written by one statement, on both databases."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import sqlalchemy as sa
from tests.usage_rows import make_row

from moiety_platform.clock import ManualClock
from moiety_platform.db.bulk import BulkAdd, BulkInsert, BulkStatement
from moiety_platform.db.session import Database
from moiety_platform.quota.models import QuotaWindow
from moiety_platform.randomness import ordered_hex
from moiety_platform.usage.ledger_entries import settle
from moiety_platform.usage.models import LedgerEntry
from moiety_platform.usage.row import KILLED, UsageRow

KEYS = ("quota_id", "start")
insert = BulkInsert(QuotaWindow, lambda statement: statement.on_conflict_do_nothing())
add = BulkAdd(QuotaWindow, "granted", KEYS)
WINDOW = (QuotaWindow.quota_id, QuotaWindow.start)
read = BulkStatement(
    WINDOW, lambda given, _: sa.select(*WINDOW, QuotaWindow.granted).where(sa.tuple_(*WINDOW).in_(given))
)
LEFT = QuotaWindow.granted - QuotaWindow.settled
BYTES = sa.literal(b"\0\xff", sa.LargeBinary), sa.type_coerce(sa.null(), sa.LargeBinary)
read_all = BulkStatement(
    [QuotaWindow.quota_id],
    lambda given, _: (
        sa.select(QuotaWindow.start, QuotaWindow.quota_id, LEFT - sa.bindparam("less", type_=sa.BigInteger), *BYTES)
        .where(QuotaWindow.quota_id.in_(given))
        .order_by(QuotaWindow.start)
        .with_for_update()
    ),
)


@pytest.mark.parametrize("num_rows", [1, 2, 1500])
async def test_any_number_of_rows_takes_one_statement_each_time(database: Database, num_rows: int) -> None:
    start = ManualClock().now()
    keys = [(f"quo_{number}", start + timedelta(microseconds=number)) for number in range(num_rows)]
    async with database.write() as session:
        await insert(session, [(*key, 2**40, 0) for key in keys])
        before = database.num_statements
        await insert(session, [(*key, 0, 0) for key in keys])
        await add(session, {key: number for number, key in enumerate(keys)} | {("quo_unknown", start): 1})
        found = await read.read(session, keys[1:])
        rows = {(quota_id, moment): granted for quota_id, moment, granted in found}
        assert database.num_statements - before == 3
    assert rows == {key: 2**40 + number for number, key in enumerate(keys) if number > 0}


@pytest.mark.parametrize("num_rows", [0, 1, 1500])
async def test_bulk_reads_equal_reads_of_single_rows(database: Database, num_rows: int) -> None:
    start = ManualClock().now()
    async with database.write() as session:
        await insert(session, [(f"quo_{n}", start + timedelta(microseconds=n), 2**60 + n, 0) for n in range(num_rows)])
        ids = [(f"quo_{n}",) for n in range(num_rows)]
        await read_all.lock(session, ids, less=2)
        found = sorted(map(tuple, await read_all.read(session, ids, less=2)))
        by_the_row = sa.select(QuotaWindow.start, QuotaWindow.quota_id, LEFT - 2, *BYTES)
        assert found == sorted(map(tuple, await session.execute(by_the_row)))
    assert len(found) == num_rows


async def test_settling_rows_again_enters_only_the_new_ones(
    database: Database,
) -> None:
    rows = [killed_row(f"request-{number}") for number in range(9)]
    async with database.write() as session:
        assert await settle(session, rows[2:5]) == {"request-2", "request-3", "request-4"}
        assert await settle(session, rows[2:5]) == set()
        assert await settle(session, rows) == {row.request_id for row in rows} - {"request-2", "request-3", "request-4"}
        entered = await session.scalars(sa.select(LedgerEntry.request_id).order_by(LedgerEntry.request_id))
        assert list(entered) == [row.request_id for row in rows]


def killed_row(request_id: str) -> UsageRow:
    return make_row(request_id, started_at=ManualClock().now(), **KILLED)


def test_ids_of_later_milliseconds_stand_behind_those_of_earlier_ones() -> None:
    first, made_ms = ordered_hex(), time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == made_ms:
        pass
    second = ordered_hex()
    assert first < second
    assert len(first) == len(second) == 32

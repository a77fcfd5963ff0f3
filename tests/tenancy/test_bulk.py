"""Many rows by one statement, on both databases."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import sqlalchemy as sa

from moiety_platform.clock import ManualClock
from moiety_platform.db.bulk import BulkAdd, BulkInsert, listed
from moiety_platform.db.session import Database
from moiety_platform.quota.models import QuotaWindow
from moiety_platform.randomness import ordered_hex

KEYS = ("quota_id", "start")
insert = BulkInsert(QuotaWindow, lambda statement: statement.on_conflict_do_nothing())
add = BulkAdd(QuotaWindow, "granted", KEYS)


@pytest.mark.parametrize("num_rows", [1, 2, 1500])
async def test_any_number_of_rows_takes_one_statement_each_time(database: Database, num_rows: int):
    start = ManualClock().now()
    keys = [(f"quo_{number}", start + timedelta(microseconds=number)) for number in range(num_rows)]
    async with database.write() as session:
        await insert(session, [(*key, 2**40, 0) for key in keys])
        before = database.num_statements
        await insert(session, [(*key, 0, 0) for key in keys])
        await add(session, {key: number for number, key in enumerate(keys)} | {("quo_unknown", start): 1})
        columns = (QuotaWindow.quota_id, QuotaWindow.start)
        wanted = sa.tuple_(*columns).in_(listed(session, columns, keys[1:]))
        found = await session.execute(sa.select(*columns, QuotaWindow.granted).where(wanted))
        rows = {(quota_id, moment): granted for quota_id, moment, granted in found}
        assert database.num_statements - before == 3
    assert rows == {key: 2**40 + number for number, key in enumerate(keys) if number > 0}


def test_ids_of_later_milliseconds_stand_behind_those_of_earlier_ones():
    first, made_ms = ordered_hex(), time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == made_ms:
        pass
    second = ordered_hex()
    assert first < second
    assert len(first) == len(second) == 32

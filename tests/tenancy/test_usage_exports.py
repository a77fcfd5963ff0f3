"""Exports of usage: each finished day once, exact, again when it changes, and resumed after a kill at any moment."""

from __future__ import annotations

import asyncio
import csv
import io
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import BigInteger, cast, func, literal, select
from tests.usage_rows import make_row

from moiety_platform.db.session import Database
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.retention.jobs import retention_jobs_of
from moiety_platform.retention.service import ObjectJob
from moiety_platform.settings import GatewaySettings
from moiety_platform.usage.days import DAY, sum_up_some
from moiety_platform.usage.models import LedgerEntry, UsageDay
from moiety_platform.usage.store import insert_rows
from moiety_platform.usage_exports.files import ExportFormat, encode, encode_csv
from moiety_platform.usage_exports.focus import COLUMNS, DayUsage, rows_of
from moiety_platform.usage_exports.models import UsageExport
from moiety_platform.usage_exports.service import UsageExports, key_of

from .conftest import Demo

FIRST = datetime(2026, 3, 29, tzinfo=UTC)  # the month ends within
NOW = FIRST + 6 * DAY + timedelta(hours=5)
NOW_MS = round(NOW.timestamp() * 1000)
NUM_DAYS = 6


def at_now() -> Any:
    return cast(literal(NOW_MS), BigInteger)


@pytest.fixture
async def used(database: Database, demo: Demo) -> Database:
    """Six finished days, of which the third had no request, and a part of today."""
    rows = [
        make_row(f"r{number}", tenant_id=demo.tenant_id if number % 3 else "=ten_gone", project_id=demo.project_id,
                 key_id=demo.key_id, model=f"m{number % 2}", started_at=FIRST + timedelta(hours=number, minutes=7),
                 output_tokens=number, cost_nanodollars=number**4 + 1, credit_nanodollars=0 if number % 5 else number)
        for number in range(6 * 24 + 4)
        if number // 24 != 2
    ]  # fmt: skip
    async with database.write() as session:
        await insert_rows(session, rows)
    await sum_up(database)
    return database


async def sum_up(database: Database) -> None:
    async with database.write() as session:
        while await sum_up_some(session, NOW):
            pass


def exporter(database: Database, objects: ObjectStore, file_format: str = "csv", num_days: int = 62) -> UsageExports:
    return UsageExports(database, objects, ExportFormat(file_format), num_days, at_now)


async def export_all(exports: UsageExports) -> int:
    num_days = 0
    while await exports.export_next():
        num_days += 1
    return num_days


async def keys_in(objects: ObjectStore) -> list[str]:
    return sorted([one.key async for page in objects.list_pages("exports/") for one in page])


async def read(objects: ObjectStore, day: datetime, file_format: ExportFormat = ExportFormat.CSV) -> bytes:
    data = await objects.read_mark(key_of(day, file_format))
    assert data is not None
    return data


def in_rows(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode(), newline="")))


async def billed(database: Database, day: datetime) -> Decimal:
    """What the ledger bills for a day, in dollars."""
    entries = select(func.coalesce(func.sum(LedgerEntry.cost_nanodollars), 0))
    async with database.read() as session:
        found = await session.scalar(entries.where(LedgerEntry.started_at >= day, LedgerEntry.started_at < day + DAY))
    return Decimal(int(found or 0)) / 10**9


async def test_each_finished_day_is_one_file_whose_costs_are_those_of_the_ledger(
    used: Database, objects: ObjectStore, demo: Demo
) -> None:
    assert await export_all(exporter(used, objects)) == NUM_DAYS - 1, "a day without requests has no file"
    days = [FIRST + number * DAY for number in range(NUM_DAYS) if number != 2]
    assert await keys_in(objects) == sorted(key_of(day, ExportFormat.CSV) for day in days)
    assert "exports/usage/csv/2026-04/usage-2026-04-01.csv" in await keys_in(objects)
    for day in days:
        rows = in_rows(await read(objects, day))
        assert list(rows[0]) == list(COLUMNS)
        cost = sum((Decimal(row["BilledCost"]) for row in rows), Decimal())
        assert cost == await billed(used, day) > 0
        assert {row["ChargeCategory"] for row in rows} == {"Usage", "Credit"}
        assert all(Decimal(row["BilledCost"]) < 0 for row in rows if row["ChargeCategory"] == "Credit")
        requests = [int(row["x_Requests"]) for row in rows if row["ChargeCategory"] == "Usage"]
        assert sum(requests) == 24
        month = f"{day:%Y-%m}-01T00:00:00Z"
        assert {(row["ChargePeriodStart"], row["BillingPeriodStart"]) for row in rows} == {
            (f"{day:%Y-%m-%d}T00:00:00Z", month)
        }
        names = {row["BillingAccountId"]: row["BillingAccountName"] for row in rows}
        assert names == {demo.tenant_id: "acme", "'=ten_gone": ""}, "and a name is no formula"


async def test_a_day_is_exported_once_and_again_when_its_usage_changes(used: Database, objects: ObjectStore) -> None:
    exports = exporter(used, objects)
    await export_all(exports)
    before = await read(objects, FIRST + DAY)
    async with used.read() as session:
        noted = {one.day: one.digest for one in await session.scalars(select(UsageExport))}
    assert await export_all(exports) == 0
    async with used.write() as session:
        late = make_row("late", started_at=FIRST + DAY + timedelta(hours=3), cost_nanodollars=5)
        await insert_rows(session, [late])
    assert await export_all(exports) == 0, "not before its sums are made again"
    await sum_up(used)
    assert await export_all(exports) == 1
    after = await read(objects, FIRST + DAY)
    assert len(in_rows(after)) == len(in_rows(before)) + 1
    assert sum(Decimal(row["BilledCost"]) for row in in_rows(after)) == await billed(used, FIRST + DAY)
    async with used.read() as session:
        again = {one.day: one.digest for one in await session.scalars(select(UsageExport))}
    assert {day for day in noted if noted[day] != again[day]} == {FIRST + DAY}
    assert await export_all(exporter(used, objects, num_days=2)) == 0


async def test_only_the_last_days_are_exported(used: Database, objects: ObjectStore) -> None:
    assert await export_all(exporter(used, objects, num_days=2)) == 2
    assert [key[-14:] for key in await keys_in(objects)] == ["2026-04-02.csv", "2026-04-03.csv"]


async def test_parquet_has_the_same_rows_with_exact_decimals(used: Database, objects: ObjectStore) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    for file_format in ("parquet", "csv"):
        assert await export_all(exporter(used, objects, file_format)) == NUM_DAYS - 1
    data = await read(objects, FIRST, ExportFormat.PARQUET)
    table = pq.read_table(io.BytesIO(data))
    assert table.column_names == list(COLUMNS)
    rows, texts = table.to_pylist(), in_rows(await read(objects, FIRST))
    assert [row["BilledCost"] for row in rows] == [Decimal(row["BilledCost"]) for row in texts]
    assert sum(row["BilledCost"] for row in rows) == await billed(used, FIRST)
    assert rows[0]["ChargePeriodStart"] == FIRST and rows[0]["BillingPeriodEnd"] == datetime(2026, 4, 1, tzinfo=UTC)
    assert [row["x_Requests"] for row in rows] == [int(row["x_Requests"] or 0) or None for row in texts]


AMOUNTS = st.integers(0, 2**55)
USAGE = st.builds(
    lambda cost, credit, count: DayUsage(
        "t", "p", "k", "m", "c", count, count, 0, count, 0, cost - credit, credit, count, count, count, count
    ),
    AMOUNTS, AMOUNTS, st.integers(0, 2**40),
)  # fmt: skip
REASONS = st.dictionaries(st.sampled_from(["ttft", "finish", "failed", "of a later release"]), AMOUNTS)


@given(st.lists(USAGE, max_size=5), REASONS)
def test_billed_costs_of_a_file_add_up_to_the_cost_to_the_nano_dollar(
    usage: list[DayUsage], by_reason: dict[str, int]
) -> None:
    credited = {("t", "p", "k", "m", "c"): by_reason}
    rows = in_rows(encode_csv(rows_of(FIRST, usage, {}, credited)))
    cost = sum((Decimal(row["BilledCost"]) for row in rows), Decimal())
    assert cost * 10**9 == sum(one.cost_nanodollars for one in usage)
    assert all(Decimal(row["BilledCost"]) <= 0 for row in rows if row["ChargeCategory"] == "Credit")
    again = rows_of(FIRST, usage, {}, credited)
    assert encode(ExportFormat.CSV, again) == encode_csv(rows_of(FIRST, usage, {}, credited))


async def test_an_invoice_has_attainment_and_the_credits_by_reason(
    database: Database, objects: ObjectStore, demo: Demo
) -> None:
    def row(name: str, **fields: Any) -> Any:
        ids = {"tenant_id": demo.tenant_id, "project_id": demo.project_id, "key_id": demo.key_id}
        return make_row(name, **ids, model="m", started_at=FIRST, cost_nanodollars=100, **fields)

    missed: dict[str, Any] = {"guarantee_met": False, "slo_attained": False}
    rows = [
        row("late", **missed, credit_nanodollars=25, credit_reason="ttft"),
        row("late too", **missed, credit_nanodollars=5, credit_reason="ttft"),
        row("slow", **missed, credit_nanodollars=7, credit_reason="finish"),
        row("met", guarantee_met=True, slo_attained=True),
        row("without a quote", slo_attained=True),
    ]
    async with database.write() as session:
        await insert_rows(session, rows)
    await sum_up(database)
    await export_all(exporter(database, objects))
    usage, *credited = in_rows(await read(objects, FIRST))
    counts = ("x_SloRequests", "x_SloAttained", "x_Guarantees", "x_GuaranteesMet")
    assert [usage[name] for name in counts] == ["5", "2", "4", "1"]
    assert [(one["ChargeCategory"], one["x_CreditReason"], one["BilledCost"]) for one in credited] == [
        ("Credit", "finish", "-0.000000007"),
        ("Credit", "ttft", "-0.000000030"),
    ]
    assert credited[1]["ChargeDescription"].endswith("in the class standard: a first token came late")
    assert sum(Decimal(one["BilledCost"]) for one in (usage, *credited)) == await billed(database, FIRST)


KILLED = """
import asyncio, sys
from sqlalchemy import BigInteger, cast, literal
from moiety_platform.db.session import Database
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.usage_exports.files import ExportFormat
from moiety_platform.usage_exports.service import UsageExports


class Stuck(UsageExports):
    async def _note(self, session, day, *rest):
        if day.day == 1:  # its file is written, its row is not: here the process is killed
            print("written", file=sys.stderr, flush=True)
            await asyncio.sleep(600)
        await UsageExports._note(self, session, day, *rest)


async def main(url, folder, now_ms):
    now = lambda: cast(literal(int(now_ms)), BigInteger)
    exports = Stuck(Database.open(url), ObjectStore.open(folder), ExportFormat.CSV, 62, now)
    while await exports.export_next():
        pass


asyncio.run(main(*sys.argv[1:]))
"""


async def test_an_export_that_is_killed_is_continued_by_the_next_one(
    used: Database, objects: ObjectStore, database_url: str, tmp_path: Path
) -> None:
    folder = (tmp_path / "objects").as_uri()
    command = sys.executable, "-c", KILLED, database_url, folder, str(NOW_MS)
    child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        assert child.stderr is not None and await child.stderr.readline() == b"written\n"
    finally:
        child.kill()
        await child.wait()
    assert len(await keys_in(objects)) == 3
    async with used.read() as session:
        assert await session.scalar(select(func.count()).select_from(UsageExport)) == 2
    written = await read(objects, FIRST + 3 * DAY)
    assert await export_all(exporter(used, objects)) == 3
    assert await read(objects, FIRST + 3 * DAY) == written, "the file of the killed process is written again, the same"
    assert len(await keys_in(objects)) == NUM_DAYS - 1
    async with used.read() as session:
        assert await session.scalar(select(func.count()).select_from(UsageDay)) == sum(
            [one.num_rows for one in await session.scalars(select(UsageExport))]
        )


async def test_the_setting_adds_a_retention_job_which_one_gateway_runs_at_a_time(
    used: Database, objects: ObjectStore, tmp_path: Path
) -> None:
    def jobs(**given: Any) -> list[Any]:
        settings = GatewaySettings(data_dir=tmp_path, **given)
        return [one for one in retention_jobs_of(settings, used, objects, at_now) if one.name == "usage_exports"]

    assert jobs() == []
    (job,) = jobs(usage_export_format="csv")
    assert isinstance(job, ObjectJob)
    assert await job.work() == 1
    assert await keys_in(objects) == [key_of(FIRST, ExportFormat.CSV)]

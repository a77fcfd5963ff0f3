"""Usage rows are stored exactly once, and none is lost, during database failures."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.usage_rows import NOON, make_row

from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.usage import journal
from moiety_platform.usage.journal import Journal
from moiety_platform.usage.models import LedgerEntry, UsageHour, UsageRecord
from moiety_platform.usage.reconciliation import reconcile
from moiety_platform.usage.recorder import UsageRecorder, storable
from moiety_platform.usage.row import KILLED as OF_KILLED
from moiety_platform.usage.row import UsageRow

from .conftest import CuttableStore


async def stored_ids(database: Database) -> list[str]:
    async with database.read() as session:
        return list(await session.scalars(sa.select(UsageRecord.request_id).order_by(UsageRecord.request_id)))


async def forget_all(database: Database) -> None:
    async with database.write() as session:
        for table in (UsageRecord, LedgerEntry, UsageHour):
            await session.execute(sa.delete(table))


@asynccontextmanager
async def recording(database: Database, folder: Path, **options: object) -> AsyncIterator[UsageRecorder]:
    recorder = UsageRecorder(database, folder, **options)
    await recorder.start()
    try:
        yield recorder
    finally:
        await recorder.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Wait, with a deadline, for a condition that no event announces."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_row_is_stored_as_it_was_recorded(database: Database, tmp_path: Path) -> None:
    row = make_row("r1", error_code="engine_failed", queue_ms=None, prompt_tokens=2**40)
    async with recording(database, tmp_path / "journal") as recorder:
        recorder.record(row)
        await recorder.flush()
        async with database.read() as session:
            record = (await session.scalars(sa.select(UsageRecord))).one()
    fields = [name for name in UsageRow.__struct_fields__ if name not in ("charges", "receipt")]
    assert UsageRow(**{name: getattr(record, name) for name in fields}) == row


async def test_rows_reach_the_database_without_a_flush_and_in_few_statements(
    database: Database, tmp_path: Path
) -> None:
    statements: list[str] = []
    sa.event.listen(database.engine.sync_engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    async with recording(database, tmp_path / "journal") as recorder:
        for number in range(300):
            recorder.record(make_row(f"r{number:03}"))
        await until(lambda: recorder.stats().stored == 300)
    assert len(await stored_ids(database)) == 300
    assert sum(statement.startswith("INSERT") for statement in statements) <= 8, (
        "at most two batches, of requests, entries, and sums by hour and minute"
    )


async def test_stopping_stores_all_that_was_recorded(database: Database, tmp_path: Path) -> None:
    async with recording(database, tmp_path / "journal", interval_s=60.0) as recorder:
        for number in range(1234):
            recorder.record(make_row(f"r{number:04}"))
    assert len(await stored_ids(database)) == 1234
    assert recorder.stats().pending == 0


async def test_under_load_rows_gather_for_a_while_and_share_their_statements(
    database: Database, tmp_path: Path
) -> None:
    inserts: list[float] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO usage "):
            inserts.append(time.monotonic())

    sa.event.listen(database.engine.sync_engine, "before_cursor_execute", note)
    async with recording(database, tmp_path / "journal", interval_s=0.02) as recorder:
        for number in range(400):
            recorder.record(make_row(f"r-{number}"))
            await asyncio.sleep(0.001)
        await recorder.flush()
        gaps = [later - earlier for earlier, later in itertools.pairwise(inserts[:-1])]
        assert all(gap >= 0.015 for gap in gaps), "none follows another at once"
    assert len(await stored_ids(database)) == 400


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 15), max_size=12), min_size=1, max_size=4), st.integers(1, 20))
async def test_each_request_counts_once_however_often_and_by_whomever_it_is_recorded(
    database: Database, tmp_path: Path, recorders: list[list[int]], max_pending: int
) -> None:
    await forget_all(database)

    async def run(numbers: list[int]) -> None:
        async with recording(database, tmp_path / "journal", max_pending=max_pending, interval_s=0.001) as recorder:
            for number in numbers:
                recorder.record(make_row(f"r{number:02}"))
                await asyncio.sleep(0)

    await asyncio.gather(*(run(numbers) for numbers in recorders))
    async with recording(database, tmp_path / "journal") as last:  # what a full memory sent to the journal
        await last.flush()
    assert await stored_ids(database) == sorted({f"r{number:02}" for numbers in recorders for number in numbers})


async def test_rows_survive_an_outage_in_bounded_memory_and_are_stored_once_when_it_ends(
    cuttable: CuttableStore, tmp_path: Path
) -> None:
    folder = tmp_path / "journal"
    async with recording(cuttable.database, folder, max_pending=50, interval_s=0.01) as recorder:
        recorder.record(make_row("before"))
        await recorder.flush()
        await cuttable.wire.cut()
        for number in range(500):
            recorder.record(make_row(f"r{number:03}"))
            assert recorder.stats().pending <= 50
            await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await recorder.flush()
        assert (recorder.stats().pending, recorder.stats().journaled) == (0, 500)
        assert await stored_ids(cuttable.steady) == ["before"]
        await cuttable.wire.mend()
        await until(lambda: not recorder.stats().journal_waiting)
        assert await stored_ids(cuttable.steady) == ["before", *(f"r{number:03}" for number in range(500))]
    assert list(folder.iterdir()) == []


async def test_rows_recorded_during_an_outage_survive_the_process_and_a_later_one_stores_them(
    cuttable: CuttableStore, tmp_path: Path
) -> None:
    folder = tmp_path / "journal"
    await cuttable.wire.cut()
    async with recording(cuttable.database, folder) as first:
        for number in range(20):
            first.record(make_row(f"r{number:02}"))
    assert first.stats().pending == 0
    await cuttable.wire.mend()
    async with recording(cuttable.database, folder) as second:
        await until(lambda: not second.stats().journal_waiting)
    assert await stored_ids(cuttable.steady) == [f"r{number:02}" for number in range(20)]


async def test_rows_wait_in_the_journal_while_another_process_keeps_the_database_locked(
    migrated_sqlite: Path, tmp_path: Path
) -> None:
    path = tmp_path / "moiety.db"
    shutil.copy(migrated_sqlite, path)
    database = Database.open(f"sqlite:///{path}", busy_timeout_s=0.01)
    other = Database.open(f"sqlite:///{path}")
    async with recording(database, tmp_path / "journal", interval_s=0.01) as recorder:
        async with other.write() as session:
            await session.execute(sa.delete(UsageRecord))
            recorder.record(make_row("r1"))
            await until(lambda: recorder.stats().journal_waiting)
        await until(lambda: not recorder.stats().journal_waiting)
    assert await stored_ids(other) == ["r1"]
    await database.close()
    await other.close()


async def test_rows_in_the_journal_of_an_earlier_release_keep_their_slo_outcome(
    database: Database, tmp_path: Path
) -> None:
    lines = [journal.to_line(make_row(name, slo_attained=name == "met")) for name in ("met", "missed")]
    former = [line.replace(b'"slo_attained"', b'"sla_attained"') for line in lines]
    (tmp_path / "1-former.jsonl").write_bytes(b"\n".join(former) + b"\n")
    async with recording(database, tmp_path) as recorder:
        await until(lambda: not recorder.stats().journal_waiting)
    async with database.read() as session:
        rows = (await session.execute(sa.select(UsageRecord.request_id, UsageRecord.slo_attained))).all()
    assert sorted(map(tuple, rows)) == [("met", True), ("missed", False)]


async def test_the_journal_of_a_living_process_is_left_alone_and_that_of_a_dead_one_is_taken(
    database: Database, tmp_path: Path
) -> None:
    script = (
        "import sys, pathlib, msgspec\n"
        "from moiety_platform.usage.journal import Journal\n"
        "from moiety_platform.usage.row import UsageRow\n"
        "journal = Journal(pathlib.Path(sys.argv[1]))\n"
        "journal.append([msgspec.json.decode(sys.argv[2], type=UsageRow)], sync=True)\n"
        "print('written', flush=True)\n"
        "sys.stdin.read()\n"
    )
    from moiety_platform.usage.journal import to_line

    folder = tmp_path / "journal"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(folder), to_line(make_row("theirs")).decode()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"written\n"
    async with recording(database, folder) as recorder:
        await recorder.flush()
        assert await stored_ids(database) == []
    process.kill()
    await process.communicate()
    async with recording(database, folder) as recorder:
        await recorder.flush()
    assert await stored_ids(database) == ["theirs"]


async def test_a_torn_line_is_kept_aside_and_costs_no_other_row(database: Database, tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    journal = Journal(folder)
    journal.append([make_row("r1"), make_row("r2")], sync=True)
    journal.close()
    (segment,) = folder.glob("*.jsonl")
    segment.write_bytes(segment.read_bytes() + b'{"request_id":"torn","tena')
    async with recording(database, folder) as recorder:
        await recorder.flush()
    assert await stored_ids(database) == ["r1", "r2"]
    assert (folder / "damaged.txt").read_bytes() == b'{"request_id":"torn","tena\n'
    assert list(folder.glob("*.jsonl")) == []


async def test_a_row_that_the_database_refuses_is_quarantined_and_its_neighbours_are_stored(
    database: Database, tmp_path: Path
) -> None:
    bad = make_row("bad", duration_ms=None)  # what the type checker would have refused
    async with recording(database, tmp_path / "journal", interval_s=60.0) as recorder:
        for row in (make_row("a"), bad, make_row("b")):
            recorder.record(row)
        await recorder.flush()
        assert recorder.stats().refused == 1
    assert await stored_ids(database) == ["a", "b"]
    assert b'"bad"' in (tmp_path / "journal" / "refused.txt").read_bytes()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=st.text(st.characters(exclude_categories=()), max_size=400),
    tokens=st.integers(),
    status=st.integers(),
    ttft_ms=st.one_of(st.none(), st.floats()),
    credit=st.integers(),
)
async def test_no_content_of_a_row_can_keep_it_from_being_stored(
    database: Database, tmp_path: Path, model: str, tokens: int, status: int, ttft_ms: float | None, credit: int
) -> None:
    fields = {"predicted_ttft_ms": ttft_ms, "credit_nanodollars": credit}
    row = make_row("r", model=model, prompt_tokens=tokens, http_status=status, ttft_ms=ttft_ms, **fields)
    await forget_all(database)
    async with recording(database, tmp_path / "journal") as recorder:
        recorder.record(row)
        await recorder.flush()
        assert recorder.stats().refused == 0
    assert await stored_ids(database) == ["r"]


def test_an_ordinary_row_is_stored_without_a_change() -> None:
    row = make_row("r", started_at=NOON + timedelta(microseconds=1))
    assert storable(row) is row


async def test_with_database_and_journal_both_away_every_lost_row_is_in_the_log_with_all_its_fields(
    cuttable: CuttableStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal").mkdir()
    async with recording(cuttable.database, tmp_path / "journal", max_pending=1, interval_s=60.0) as recorder:
        await cuttable.wire.cut()
        (tmp_path / "journal").rmdir()
        (tmp_path / "journal").write_text("in the way")
        recorder.record(make_row("kept"))
        recorder.record(make_row("beyond"))
    said = capsys.readouterr().out
    assert "usage_row_unstored" in said
    for request_id in ("kept", "beyond"):
        assert f'"request_id":"{request_id}"' in said.replace("\\", "")


KILLED = """
import asyncio, pathlib, sys
import msgspec
from moiety_platform.db.session import Database
from moiety_platform.usage.recorder import UsageRecorder
from moiety_platform.usage.row import KILLED as OF_KILLED
from moiety_platform.usage.row import UsageRow

async def main():
    recorder = UsageRecorder(Database.open(sys.argv[1]), pathlib.Path(sys.argv[2]), interval_s=60.0)
    await recorder.start()
    for row in msgspec.json.decode(sys.argv[3], type=list[UsageRow]):
        recorder.opened(row)
        if row.outcome:
            recorder.record(row)
    await asyncio.sleep(0)  # the turn ends, in which they came
    print("recorded", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def record_and_be_killed(database_url: str, journal: Path, rows: list[UsageRow]) -> None:
    """Record the rows in another process, which is killed before it stores them."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED, database_url, str(journal), msgspec.json.encode(rows).decode()),
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"recorded\n"
    process.kill()
    await process.communicate()


async def test_a_kill_loses_no_row_and_what_ran_is_stored_as_failed(
    database: Database, database_url: str, tmp_path: Path
) -> None:
    credit = {"cost_nanodollars": 75, "credit_nanodollars": 25, "credit_reason": "ttft", "guarantee_met": False}
    rows = [make_row("ended", **credit), make_row("running", **({"prompt_tokens": 11} | OF_KILLED))]
    await record_and_be_killed(database_url, tmp_path / "journal", rows)
    assert await stored_ids(database) == []
    for _ in range(2):  # a second start finds nothing more
        async with recording(database, tmp_path / "journal") as recorder:
            await recorder.flush()
    async with database.read() as session:
        ended, running = await session.scalars(sa.select(UsageRecord).order_by(UsageRecord.request_id))
        entries = await session.execute(
            sa.select(LedgerEntry.kind, LedgerEntry.cost_nanodollars).order_by(LedgerEntry.cost_nanodollars)
        )
        assert [tuple(entry) for entry in entries] == [("credited", -25), ("settled", 0), ("settled", 100)]
        assert (await reconcile(session, NOON, NOON + timedelta(hours=1))).agrees
    assert (ended.outcome, ended.output_tokens, ended.error_code) == ("stop", 7, None)
    assert (running.outcome, running.http_status, running.error_code) == ("failed", 499, "gateway_killed")
    assert (running.prompt_tokens, running.output_tokens) == (11, 0)
    assert list((tmp_path / "journal").iterdir()) == []


async def test_the_live_log_stays_small_and_keeps_what_still_runs(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "COMPACT_BYTES", 4096)
    folder = tmp_path / "journal"
    async with recording(database, folder, interval_s=60.0) as recorder:
        recorder.opened(make_row("long"))
        for number in range(200):
            recorder.opened(make_row(f"r{number:03}"))
            recorder.record(make_row(f"r{number:03}"))
            if number % 10 == 9:
                await recorder.flush()
        (segment,) = folder.iterdir()
        assert segment.stat().st_size < 2 * 4096 + 10_000
        assert segment.stat().st_mode & 0o077 == 0
        recorder.record(make_row("long"))
        await recorder.flush()
        assert segment.stat().st_size == 0 or not segment.exists()
    assert len(await stored_ids(database)) == 201
    assert list(folder.iterdir()) == []

"""A full disk while usage rows and receipts are written: it is named, nothing hangs, and nothing is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs
from tests.full_disk import full_disk
from tests.usage_rows import make_row

from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.receipts.signing import BadReceiptKey, load_signer
from moiety_platform.usage.journal import Journal, LiveLog
from moiety_platform.usage.quarantined_rows import QuarantinedUsage

from .conftest import CuttableStore
from .test_receipt_chains import asking, check
from .test_recorder import recording, until

NUM_ROWS = 200  # which need more pages than SQLite has free
FUNCTION = """
CREATE FUNCTION refuse_receipts() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$
"""
TRIGGER = "CREATE TRIGGER disk_full BEFORE INSERT ON receipts FOR EACH ROW EXECUTE FUNCTION refuse_receipts()"
SetFull = Callable[[bool], Awaitable[None]]


@pytest.fixture
async def set_full(database: Database) -> SetFull:
    """`await set_full(True)`: the database has no space for receipts."""
    limit = [2**30]
    if database.dialect == "sqlite":

        def limit_pages(connection: sa.Connection) -> None:
            connection.exec_driver_sql(f"PRAGMA max_page_count = {limit[0]}")

        sa.event.listen(database.engine.sync_engine, "begin", limit_pages)

    async def change(is_full: bool) -> None:
        limit[0] = 1 if is_full else 2**30
        if database.dialect == "postgresql":
            statements = (FUNCTION, TRIGGER) if is_full else ("DROP FUNCTION refuse_receipts CASCADE",)
            async with database.write() as session:
                for statement in statements:
                    await session.execute(sa.text(statement))

    return change


async def test_receipts_wait_in_the_journal_while_the_disk_of_the_database_is_full(
    database: Database, set_full: SetFull, tmp_path: Path
) -> None:
    await set_full(True)
    with capture_logs() as said:
        async with recording(database, tmp_path / "journal", interval_s=0.01) as recorder:
            for number in range(NUM_ROWS):
                recorder.record(asking(f"r{number:03}"))
            with pytest.raises(Unavailable, match="disk of the database is full"):
                await recorder.flush()
            await until(lambda: any(line["event"] == "usage_store_unreachable" for line in said))
            assert recorder.stats().journal_waiting and not recorder.stats().pending
            await set_full(False)
            await recorder.flush()
    (line,) = [line for line in said if line["event"] == "usage_store_unreachable"]
    assert "disk of the database is full" in line["reason"]
    assert line["advice"].startswith("free some space on the disk")
    await check(database, NUM_ROWS)
    assert list((tmp_path / "journal").iterdir()) == []


def test_a_row_that_the_full_disk_of_the_journal_took_in_part_costs_no_later_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open()
    for sync in (True, False):
        journal.append([asking("a")], sync=sync)
        (path,) = tmp_path.glob("*.jsonl")
        size = path.stat().st_size
        with full_disk(size + 20), pytest.raises(OSError, match="too large"):
            journal.append([asking("b"), asking("c")], sync=sync)
        assert path.stat().st_size == size
        journal.append([asking("d")], sync=sync)
        segment = journal.claim()
        assert segment is not None and [row.request_id for row in segment.read()] == ["a", "d"]
        segment.remove(QuarantinedUsage(tmp_path).add_damaged)
    assert list(tmp_path.iterdir()) == [], "no line is damaged"


def test_the_live_log_has_all_rows_again_once_its_disk_has_room(tmp_path: Path) -> None:
    log, rows = LiveLog(tmp_path), [make_row(name) for name in "abc"]
    log.add(rows[:1])
    (path,) = tmp_path.iterdir()
    with capture_logs() as said, full_disk(path.stat().st_size + 20):
        for row in rows[1:]:
            log.add([row])
            log.trim(rows)
        assert [line["event"] for line in said] == ["usage_live_log_failed"]
    log.add([make_row("d")])
    log.trim([*rows, make_row("d")])
    log.close(keep=True)
    (path,) = tmp_path.iterdir()
    assert [line.split(b'"')[3] for line in path.read_bytes().splitlines()] == [b"a", b"b", b"c", b"d"]


async def test_rows_that_neither_database_nor_journal_took_stay_in_the_live_log(
    cuttable: CuttableStore, tmp_path: Path
) -> None:
    folder, moved = tmp_path / "journal", tmp_path / "moved"
    with capture_logs() as said:
        async with recording(cuttable.database, folder, interval_s=60.0) as recorder:
            recorder.record(make_row("kept"))
            await until(lambda: folder.exists() and any(one.stat().st_size for one in folder.iterdir()))
            await cuttable.wire.cut()
            folder.rename(moved)
            folder.write_text("in the way")
    assert any(line["event"] == "usage_row_unstored" for line in said)
    (path,) = moved.iterdir()
    assert b'"request_id":"kept"' in path.read_bytes()


def test_a_full_disk_leaves_no_draft_of_the_key_of_receipts(tmp_path: Path) -> None:
    with full_disk(10), pytest.raises(BadReceiptKey, match="File too large"):
        load_signer(tmp_path / "receipts.pem")
    assert list(tmp_path.iterdir()) == []
    assert load_signer(tmp_path / "receipts.pem").keys

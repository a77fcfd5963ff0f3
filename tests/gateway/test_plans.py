"""Reads and deletions by several key columns use an index.

SQLite compares rows in a statement with every row of the table, which took seconds in a store with five million
spans."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select

from moiety_platform.db.base import Base
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.tenant_deletion.data import delete_some
from moiety_platform.trace_store.models import SpanRecord
from moiety_platform.trace_store.queries import read_trace
from moiety_platform.trace_store.store import purge_of

IDS = [f"{number:032x}" for number in range(4)]


def span(trace_id: str, links: list[dict[str, str]]) -> SpanRecord:
    return SpanRecord(
        trace_id=trace_id, span_id=trace_id[-16:], name="a", kind=1, service="s", tenant_id="t", start_ns=1, end_ns=2,
        status=0, status_message="", attributes={}, events=[], links=links, stored_ms=1,
    )  # fmt: skip


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    async with opened.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with opened.write() as session:
        linked = [{"trace_id": other, "span_id": other[-16:]} for other in IDS[1:]]
        session.add_all([span(IDS[0], linked), *(span(other, []) for other in IDS[1:])])
    yield opened
    await opened.close()


@contextlib.contextmanager
def planned(database: Database) -> Iterator[Any]:
    """What the database does for each statement meanwhile."""
    said: list[tuple[str, object]] = []

    def hear(_connection: Any, _cursor: Any, statement: Any, parameters: Any, *_: Any) -> None:
        said.append((statement, parameters))

    event.listen(database.engine.sync_engine, "before_cursor_execute", hear)
    steps: list[str] = []
    yield steps
    event.remove(database.engine.sync_engine, "before_cursor_execute", hear)
    with contextlib.closing(sqlite3.connect(database.engine.url.database or "")) as connection:
        for statement, parameters in said:
            steps += [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)]


async def test_a_trace_is_read_with_what_it_links_to_and_nothing_else(database: Any) -> None:
    with planned(database) as steps:
        async with database.read() as session:
            trace = await read_trace(session, IDS[0], ())
    assert [one.trace_id for one in trace.linked] == IDS[1:]
    assert len([step for step in steps if step.startswith("SEARCH spans USING INDEX")]) == 2
    assert not [step for step in steps if step.startswith("SCAN spans")]


async def test_old_spans_are_deleted_by_looking_them_up(database: Any) -> None:
    with planned(database) as steps:
        async with database.write() as session:
            assert await purge_of(SpanRecord, 0, now_ms)(session) == len(IDS)
    assert steps
    assert not [step for step in steps if step.startswith("SCAN spans")]
    async with database.read() as session:
        assert not (await session.scalars(select(SpanRecord))).all()


async def test_a_tenants_rows_are_deleted_by_looking_them_up(database: Any) -> None:
    with planned(database) as steps:
        async with database.write() as session:
            assert await delete_some(session, SpanRecord, "t") == len(IDS)
            assert await delete_some(session, SpanRecord, "t") == 0
    assert steps
    assert not [step for step in steps if step.startswith("SCAN spans")]

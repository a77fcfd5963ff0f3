"""Searches that few rows match read an index of such rows, on both databases."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Select, text
from sqlalchemy.ext.asyncio import AsyncSession
from tests.usage_rows import NOON, make_row

from moiety_platform.db.paging import PageRequest
from moiety_platform.db.session import Database
from moiety_platform.request_log.queries import RequestSearch
from moiety_platform.trace_store.models import UNSUCCESSFUL, TraceRecord
from moiety_platform.trace_store.queries import TraceFilter, find_traces
from moiety_platform.usage.models import UsageRecord
from moiety_platform.usage.queries import UsageFilter
from moiety_platform.usage.store import insert_rows

DAY = timedelta(days=1)


async def plan_of(session: AsyncSession, statement: Select[UsageRecord] | Select[TraceRecord]) -> str:
    """Return the database's plan of a query."""
    dialect = session.get_bind().dialect
    written = statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True})
    if dialect.name == "postgresql":
        await session.execute(text("SET LOCAL enable_seqscan = off"))
    explain = "EXPLAIN QUERY PLAN" if dialect.name == "sqlite" else "EXPLAIN"
    return " ".join(str(one) for one in (await session.execute(text(f"{explain} {written}"))).all())


async def test_an_end_user_of_any_tenant_is_found_by_an_index(database: Database) -> None:
    async with database.write() as session:
        others = [make_row(f"plain-{number}", end_user=f"user-{number}") for number in range(50)]
        await insert_rows(session, others)
    search = RequestSearch(usage=UsageFilter(NOON - DAY, NOON + DAY, end_user="user-7"))
    async with database.read() as session:
        statement = search.statement(session.get_bind().dialect.name)
        (found,) = (await session.scalars(statement)).all()
        assert found.request_id == "plain-7"
        assert "ix_usage_end_user_any_tenant" in await plan_of(session, statement)


async def test_stored_traces_of_unsuccessful_requests_are_found_by_an_index(database: Database) -> None:
    async with database.write() as session:
        for number in range(40):
            outcome = "stop" if number else UNSUCCESSFUL[0]
            session.add(
                TraceRecord(
                    trace_id=f"{number:032x}",
                    span_id=f"{number:016x}",
                    request_id=f"r-{number}",
                    tenant_id="ten_a",
                    service_class="standard",
                    operation="chat",
                    model="m",
                    started_at=NOON,
                    duration_ms=1.0,
                    outcome=outcome,
                    kept_for="rate",
                    stored_ms=0,
                )
            )
    for outcome in UNSUCCESSFUL:
        search = TraceFilter(NOON - DAY, NOON + DAY, {"outcome": outcome})
        async with database.read() as session:
            page = await find_traces(session, search, PageRequest(10, None))
            assert len(page.data) == (outcome == UNSUCCESSFUL[0])
            statement = search.statement().order_by(TraceRecord.started_at.desc(), TraceRecord.span_id.desc())
            assert "ix_traces_unsuccessful" in await plan_of(session, statement.limit(10))

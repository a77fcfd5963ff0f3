"""The report of requests with a quote reads no other requests."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import text
from tests.usage_rows import NOON, make_row

from moiety_platform.db.session import Database
from moiety_platform.usage.queries import UsageFilter
from moiety_platform.usage.quoted_requests import quoted_requests, report_quotes
from moiety_platform.usage.store import insert_rows


async def test_requests_with_a_quote_are_found_by_their_indexes(database: Database) -> None:
    times = {"predicted_ttft_ms": 10.0, "predicted_duration_ms": 40.0}
    async with database.write() as session:
        others = [make_row(f"plain-{number}", started_at=NOON + timedelta(seconds=number)) for number in range(50)]
        await insert_rows(session, [*others, make_row("quoted", guarantee_met=True, **times)])
    for tenant_id, name in ((None, "ix_usage_quoted"), ("ten_a", "ix_usage_quoted_tenant")):
        usage = UsageFilter(NOON - timedelta(days=1), NOON + timedelta(days=1), tenant_id=tenant_id)
        async with database.read() as session:
            (found,) = (await report_quotes(session, usage)).data
            dialect = session.get_bind().dialect
            written = quoted_requests(usage, dialect.name).compile(
                dialect=dialect, compile_kwargs={"literal_binds": True}
            )
            if dialect.name == "postgresql":
                await session.execute(text("SET LOCAL enable_seqscan = off"))
            explain = "EXPLAIN QUERY PLAN" if dialect.name == "sqlite" else "EXPLAIN"
            plan = " ".join(str(one) for one in (await session.execute(text(f"{explain} {written}"))).all())
        assert (found.requests, found.num_guarantees_met) == (1, 1)
        assert (f"INDEX {name} (" if dialect.name == "sqlite" else "ix_usage_quoted") in plan, plan

"""Stored traces on each database: stored once, found by their search fields, and deleted when they expire."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from sqlalchemy import ColumnElement, func, literal, select

from moiety_platform.db.paging import PageRequest, decode_cursor
from moiety_platform.db.session import Database
from moiety_platform.metrics import new_registry
from moiety_platform.retention.metrics import RetentionMetrics
from moiety_platform.retention.service import RetentionService
from moiety_platform.trace_receiver.process import DAY_MS, retention_jobs_of
from moiety_platform.trace_receiver.settings import TraceSettings
from moiety_platform.trace_store.models import SpanRecord, TraceRecord
from moiety_platform.trace_store.queries import TraceFilter, find_traces, read_trace
from moiety_platform.trace_store.rows import MAX_ATTRIBUTES, MAX_TEXT_LENGTH, Rows, rows_of
from moiety_platform.trace_store.store import insert_rows

START = datetime(2026, 1, 1, tzinfo=UTC)
START_NS = int(START.timestamp()) * 10**9


def sent(numbers: range, stored_ms: int = 0, **attributes: Any) -> Rows:
    """Requests that began a second after each other and took as many ms as their number says; a child each."""
    message = ResourceSpans()
    scope = message.scope_spans.add()
    for number in numbers:
        told: dict[str, Any] = {
            "moiety.tenant_id": f"t{number % 2}", "moiety.outcome": "stop", "moiety.service_class": "standard",
            "moiety.request_id": f"r-{number}", "moiety.kept_for": "rate", **attributes,
        }  # fmt: skip
        trace_id, own = number.to_bytes(16, "big"), number.to_bytes(8, "big")
        began = START_NS + number * 10**9
        times: dict[str, Any] = {"start_time_unix_nano": began, "end_time_unix_nano": began + number * 10**6}
        pairs = [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in told.items()]
        scope.spans.add(trace_id=trace_id, span_id=own, name="chat m", kind=2, attributes=pairs, **times)
        pairs = pairs[:1]
        scope.spans.add(trace_id=trace_id, span_id=b"child" + own[5:], parent_span_id=own, attributes=pairs, **times)
    return rows_of([message], stored_ms, is_trusted=True)


async def store(database: Database, rows: Rows) -> None:
    async with database.write() as session:
        await insert_rows(session, rows)


async def num_rows(database: Database) -> list[int | None]:
    async with database.read() as session:
        return [await session.scalar(select(func.count()).select_from(table)) for table in (TraceRecord, SpanRecord)]


async def found(database: Database, page: PageRequest | None = None, **wanted: Any) -> tuple[list[str], str | None]:
    """The numbers of the requests, and the cursor of the next page."""
    bounds: dict[str, Any] = {"since": START, "until": START + timedelta(days=1), "equal": {}}
    async with database.read() as session:
        result = await find_traces(session, TraceFilter(**bounds | wanted), page or PageRequest())
    return [view.request_id.removeprefix("r-") for view in result.data], result.next_cursor


async def test_spans_that_are_sent_twice_are_stored_once(database: Database) -> None:
    await store(database, sent(range(1, 4)))
    await store(database, sent(range(2, 6)))
    assert await num_rows(database) == [5, 10]
    async with database.read() as session:
        trace = await read_trace(session, f"{3:032x}", hidden={"moiety.tenant_id"})
    assert [(span.name, span.kind, span.parent_id) for span in trace.spans] == [
        ("chat m", "server", None), ("", "unspecified", trace.spans[0].span_id),
    ]  # fmt: skip
    assert "moiety.tenant_id" not in trace.spans[0].attributes


async def test_a_search_goes_by_each_property_and_all_of_them(database: Database) -> None:
    await store(database, sent(range(1, 9)))
    await store(database, sent(range(9, 11), **{"error.type": "engine_failed", "moiety.outcome": "failed"}))
    await store(database, sent(range(11, 12), **{"moiety.reason": "shed", "moiety.service_class": "batch"}))
    assert (await found(database))[0] == [str(number) for number in range(11, 0, -1)]
    assert (await found(database, equal={"tenant_id": "t0"}))[0] == ["10", "8", "6", "4", "2"]
    assert (await found(database, equal={"outcome": "failed", "tenant_id": "t1"}))[0] == ["9"]
    assert (await found(database, equal={"service_class": "batch"}))[0] == ["11"]
    assert (await found(database, equal={"request_id": "r-4"}))[0] == ["4"]
    assert [(await found(database, reason=reason))[0] for reason in ("engine_failed", "shed")] == [["10", "9"], ["11"]]
    assert len((await found(database, reason="rate"))[0]) == 11
    assert (await found(database, min_ms=3, max_ms=5))[0] == ["4", "3"]
    assert (await found(database, since=START + timedelta(seconds=10)))[0] == ["11", "10"]
    assert (await found(database, until=START + timedelta(seconds=2)))[0] == ["1"]


async def test_pages_continue_where_they_ended_while_traces_are_added(database: Database) -> None:
    await store(database, sent(range(1, 8)))
    seen, cursor = await found(database, PageRequest(limit=3))
    await store(database, sent(range(8, 10)))
    while cursor is not None:
        more, cursor = await found(database, PageRequest(limit=3, after=decode_cursor(cursor)))
        seen += more
    assert seen == ["7", "6", "5", "4", "3", "2", "1"]


async def test_upkeep_deletes_what_was_stored_longer_ago_than_it_is_kept(database: Database) -> None:
    now_ms = 100 * DAY_MS

    def clock() -> ColumnElement[int]:
        return literal(now_ms)

    await store(database, sent(range(1, 1300), stored_ms=now_ms - 8 * DAY_MS))
    await store(database, sent(range(1300, 1303), stored_ms=now_ms - 6 * DAY_MS))
    settings = TraceSettings(traces_token="a token of gateways")
    retention = RetentionService(
        "one",
        database,
        retention_jobs_of(settings, clock),
        RetentionMetrics(new_registry()),
        interval_s=60,
        pause_s=0,
        now=clock,
    )
    assert await retention.round() == {"spans": 2598, "traces": 1299}
    assert await num_rows(database) == [3, 6]


def test_long_attributes_are_truncated() -> None:
    rows = sent(range(1, 2), **{"long": "x" * 5000, **{f"a{number}": "v" for number in range(100)}})
    attributes = rows.spans[0][11]
    assert (len(attributes), len(attributes["long"])) == (MAX_ATTRIBUTES, MAX_TEXT_LENGTH)


async def test_unknown_kinds_and_statuses_are_stored_as_unspecified(
    database: Database,
) -> None:
    message = ResourceSpans()
    span = message.scope_spans.add().spans.add(trace_id=b"s" * 16, span_id=b"s" * 8, name="strange", kind=70_000)
    span.start_time_unix_nano, span.end_time_unix_nano, span.status.code = START_NS, START_NS + 1, 70_000
    rows = rows_of([message], 0, is_trusted=False)
    rows.spans += sent(range(1, 2)).spans
    await store(database, rows)
    async with database.read() as session:
        (strange,) = (await read_trace(session, "73" * 16, hidden=())).spans
        assert (strange.kind, strange.status) == ("unspecified", "unset")
        assert (await read_trace(session, f"{1:032x}", hidden=())).spans

"""Batches in the store, on each database: leases with a manual clock, and results that are stored once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from sqlalchemy import ColumnElement, select

from moiety_platform.auth.principal import Principal
from moiety_platform.batches.claims import ClaimedLine, OpenBatch, claim_lines, open_batches, renew_lines
from moiety_platform.batches.closing import begin_closing, close_batch, fail_unanswered
from moiety_platform.batches.deletion import delete_batch
from moiety_platform.batches.input_import import LINES_AT_ONCE, InputImport
from moiety_platform.batches.line_limits import BatchLineLimits
from moiety_platform.batches.models import Batch, BatchLine, BatchStatus, LineState
from moiety_platform.batches.outcomes import AnsweredLine, RequeuedLine, store_outcomes
from moiety_platform.batches.results import PIECE_BYTES, BatchFiles
from moiety_platform.batches.schemas import NewBatch
from moiety_platform.batches.service import CANCELLED, cancel_batch, create_batch
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import Conflict
from moiety_platform.files.contents import FileContents
from moiety_platform.files.models import FileChunk, FileState, StoredFile
from moiety_platform.files.store import begin_file
from moiety_platform.inference.shape_limits import ShapeLimits
from moiety_platform.message_batches.controller import views_of
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.quota.kinds import LimitKind, LimitLevel
from moiety_platform.quota.lease import Charge, WindowId
from moiety_platform.quota.models import LeaseState, Quota, QuotaLease, QuotaWindow
from moiety_platform.usage.models import UsageRecord
from moiety_platform.usage.row import UsageRow

URL = "/v1/completions"
LEASE_MS = 30_000
NUM_LINES = 12
LIMITS = BatchLineLimits(max_lines=100, max_line_bytes=10_000, max_json_depth=16, shape=ShapeLimits())
OWNER = Principal("key", "key", "tenant", "t", "project", "standard", 1.0, b"", frozenset())
TODAY = datetime(2026, 1, 1, tzinfo=UTC)


class StoreClock:
    """The database's clock, which may be put ahead."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def __call__(self) -> ColumnElement[int]:
        return now_ms() + self.ahead_ms


class Store:
    """A batch in progress, and what workers do to it."""

    def __init__(self, database: Database, objects: ObjectStore, now: StoreClock, batch_id: str) -> None:
        self.database = database
        self.contents = FileContents(database, objects, BatchFiles(database), now)
        self.now = now
        self.batch_id = batch_id

    async def batch(self) -> Batch:
        async with self.database.read() as session:
            return (await session.scalars(select(Batch).where(Batch.id == self.batch_id))).one()

    async def open_batch(self) -> OpenBatch:
        async with self.database.read() as session:
            (batch,) = await open_batches(session, self.now)
        return batch

    async def claim(self, owner: str, limit: int = NUM_LINES) -> list[ClaimedLine]:
        batch = await self.open_batch()
        async with self.database.write() as session:
            return await claim_lines(session, batch, owner, limit, LEASE_MS, self.now)

    async def renew(self, owner: str, lines: list[ClaimedLine]) -> set[int]:
        async with self.database.write() as session:
            kept = await renew_lines(session, [line.key for line in lines], owner, LEASE_MS, self.now)
        return {number for _, number in kept}

    async def store(self, owner: str, *outcomes: AnsweredLine | RequeuedLine) -> None:
        answered = [outcome for outcome in outcomes if isinstance(outcome, AnsweredLine)]
        put_back = [outcome for outcome in outcomes if isinstance(outcome, RequeuedLine)]
        async with self.database.write() as session:
            await store_outcomes(session, owner, answered, put_back, self.now)

    async def close(self) -> BatchStatus | None:
        is_done = False
        while not is_done:
            async with self.database.write() as session:
                is_done = await fail_unanswered(session, self.batch_id)
        async with self.database.write() as session:
            return await close_batch(session, self.batch_id, self.now)

    async def all(self, table: Any) -> list[Any]:
        async with self.database.read() as session:
            return list((await session.scalars(select(table))).all())

    async def read(self, file_id: str | None) -> list[dict[str, Any]]:
        async with self.database.read() as session:
            file = (await session.scalars(select(StoredFile).where(StoredFile.id == file_id))).one()
        content = b"".join([piece async for piece in BatchFiles(self.database).read(file)])
        assert len(content) == file.num_bytes
        return [json.loads(line) for line in content.splitlines()]


def line_of(number: int) -> bytes:
    body = {"model": "m", "prompt": f"é{number}" * number}
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": URL, "body": body}).encode()


@pytest.fixture
async def store(database: Database, objects: ObjectStore) -> AsyncIterator[Store]:
    """Yield a store whose file is of an earlier version: in SQL, in chunks so small that most lines span several."""
    now = StoreClock()
    content = b"\n".join(line_of(number) for number in range(1, NUM_LINES + 1))
    async with database.write() as session:
        file = await begin_file(session, OWNER, "in.jsonl")
        for start in range(0, len(content), 50):
            data = content[start : start + 50]
            session.add(FileChunk(file_id=file.id, start=start, stop=start + len(data), data=data))
        file.purpose, file.state, file.num_bytes, file.object_key = "batch", FileState.READY, len(content), None
        await session.flush()
        new = NewBatch(input_file_id=file.id, endpoint=URL, completion_window="24h")
        batch = await create_batch(session, OWNER, new, max_open=1, keep_files_s=None, now=now)
    made = Store(database, objects, now, batch.id)
    await InputImport(database, made.contents, await made.open_batch(), LIMITS, LEASE_MS, now).run()
    assert (await made.batch()).status == BatchStatus.IN_PROGRESS
    yield made


def answer(line: ClaimedLine, tokens: int = 5, charges: tuple[Charge, ...] = ()) -> AnsweredLine:
    row = UsageRow(
        f"request-{line.number}", "tenant", "project", "key", URL, "m", "batch", TODAY, "stop", 200, 1,
        tokens, 0, tokens, None, None, 1.0, cost_nanodollars=7, charges=charges,
    )  # fmt: skip
    content = msgspec.json.encode({"custom_id": line.custom_id, "tokens": tokens})
    return AnsweredLine(line, LineState.COMPLETED, content, row)


async def test_lines_come_out_of_the_file_as_they_went_in(store: Store) -> None:
    claimed = await store.claim("a")
    texts = [
        (line.number, await store.contents.read_range(line.input_key or "", line.start, line.num_bytes))
        for line in claimed
    ]
    assert texts == [(number, line_of(number)) for number in range(1, NUM_LINES + 1)]


async def test_workers_that_claim_at_once_get_different_lines(store: Store) -> None:
    claims = await asyncio.gather(*(store.claim(f"worker-{number}", 5) for number in range(4)))
    numbers = [line.number for lines in claims for line in lines]
    assert len(numbers) == len(set(numbers))
    rest = await store.claim("late")
    assert sorted([*numbers, *(line.number for line in rest)]) == list(range(1, NUM_LINES + 1))
    assert await store.claim("too late") == []


async def test_a_lease_that_is_not_renewed_ends_and_its_lines_are_others(store: Store) -> None:
    lines = await store.claim("a", 4)
    store.now.ahead_ms += LEASE_MS // 2
    assert await store.renew("a", lines[:2]) == {1, 2}
    store.now.ahead_ms += LEASE_MS // 2 + 1000
    assert [line.number for line in await store.claim("b", 4)] == [3, 4, 5, 6]
    assert await store.renew("a", lines) == {1, 2}


async def test_the_first_answer_counts_and_the_other_is_charged_but_not_billed(store: Store) -> None:
    quota = Quota(
        id="q", level=LimitLevel.TENANT, scope_id="tenant", kind=LimitKind.TOKENS_PER_DAY, cap=1000, created_at=TODAY
    )
    async with store.database.write() as session:
        session.add_all([quota, QuotaWindow(quota_id="q", start=TODAY, granted=200, settled=0)])
        for replica in ("a", "b"):
            lease = QuotaLease(quota_id="q", start=TODAY, replica_id=replica, granted=100, settled=0)
            lease.expires_ms, lease.state = 0, LeaseState.LIVE
            session.add(lease)
    (line,) = await store.claim("a", 1)
    store.now.ahead_ms += LEASE_MS + 1000
    (again,) = await store.claim("b", 1)
    assert again.key == line.key
    late, first = (Charge(WindowId("q", TODAY), replica, amount) for replica, amount in (("a", 30), ("b", 10)))
    await store.store("b", answer(again, 5, (first,)))
    for _ in range(2):  # as after a transaction of which nobody knows whether it was committed
        await store.store("a", answer(line, 15, (late,)))
        await store.store("b", answer(again, 5, (first,)))
    rows = {row.request_id: row for row in await store.all(UsageRecord)}
    assert {row_id: (row.output_tokens, row.cost_nanodollars) for row_id, row in rows.items()} == {
        "request-1": (5, 7),
        "request-1-a": (0, 0),
    }
    assert {lease.replica_id: lease.settled for lease in await store.all(QuotaLease)} == {"a": 30, "b": 10}
    batch = await store.batch()
    assert (batch.completed, batch.failed, batch.prompt_tokens, batch.output_tokens) == (1, 0, 5, 5)
    (stored,) = [one for one in await store.all(BatchLine) if one.number == 1]
    assert json.loads(stored.answer) == {"custom_id": "id-1", "tokens": 5}


async def test_a_line_that_comes_twice_in_one_round_counts_once(store: Store) -> None:
    first, second = await store.claim("a", 2)
    waits = RequeuedLine(first, 0.0, 1, 0)
    await store.store("a", answer(first, 5), answer(second, 6), answer(first, 7), waits)
    batch = await store.batch()
    assert (batch.completed, batch.output_tokens) == (2, 11)
    assert sorted(row.output_tokens for row in await store.all(UsageRecord)) == [5, 6]
    assert [line.number for line in await store.claim("b", 1)] == [3]


async def test_a_line_that_is_put_back_waits_its_time_unless_another_has_it(store: Store) -> None:
    first, second = await store.claim("a", 2)
    await store.store("a", RequeuedLine(first, 5.0, 1, 0))
    await store.store("b", RequeuedLine(second, 0.0, 0, 0))  # not its own
    assert [line.number for line in await store.claim("c", 1)] == [3]
    store.now.ahead_ms += 6000
    (line,) = await store.claim("c", 1)
    assert (line.number, line.num_refusals) == (1, 1)


async def test_a_batch_ends_when_its_last_line_does_and_only_once(store: Store) -> None:
    lines = await store.claim("a")
    await store.store("a", *(answer(line) for line in reversed(lines[1:])))
    assert (await store.batch()).status == BatchStatus.IN_PROGRESS
    await store.store("a", answer(lines[0]))
    assert (await store.batch()).status == BatchStatus.FINALIZING
    ends = await asyncio.gather(*(store.close() for _ in range(3)))
    assert sorted(ends, key=str) == sorted([BatchStatus.COMPLETED, None, None], key=str)
    batch = await store.batch()
    assert (batch.status, batch.total, batch.completed, batch.error_file_id) == ("completed", 12, 12, None)
    assert [one["custom_id"] for one in await store.read(batch.output_file_id)] == [f"id-{n}" for n in range(1, 13)]
    assert len([file for file in await store.all(StoredFile) if file.batch_id]) == 1


async def test_results_are_read_in_pieces_however_large_the_answers_are(store: Store) -> None:
    sizes = [PIECE_BYTES // 2 - 1, 3, PIECE_BYTES // 2 + 7, PIECE_BYTES - 1, PIECE_BYTES, 5 * PIECE_BYTES // 2, 0, 9]
    lines = (await store.claim("a"))[: len(sizes)]
    contents = [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]
    await store.store("a", *(replace(answer(line), answer=one) for line, one in zip(lines, contents, strict=True)))
    async with store.database.write() as session:
        await begin_closing(session, store.batch_id, BatchStatus.EXPIRED, {"code": "c", "message": "m"}, store.now)
    await store.close()
    (file,) = [one for one in await store.all(StoredFile) if one.id == (await store.batch()).output_file_id]
    pieces = [piece async for piece in BatchFiles(store.database).read(file)]
    assert b"".join(pieces) == b"".join(content + b"\n" for content in contents)
    assert file.num_bytes == sum(map(len, pieces))
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert len(pieces) < 12  # small ones come together


async def test_an_answer_that_comes_after_the_end_is_dropped(store: Store) -> None:
    lines = await store.claim("a")
    await store.store("a", *(answer(line) for line in lines[:3]))
    error = {"code": "gone", "message": "gone"}
    async with store.database.write() as session:
        assert await begin_closing(session, store.batch_id, BatchStatus.EXPIRED, error, store.now)
        assert not await begin_closing(session, store.batch_id, BatchStatus.FAILED, error, store.now)
    assert await store.renew("a", lines[3:]) == set(range(4, 13)), "leases do not hold the end up"
    closed, _ = await asyncio.gather(store.close(), store.store("a", *(answer(line) for line in lines[3:])))
    batch = await store.batch()
    assert (closed, batch.status, batch.completed + batch.failed) == (BatchStatus.EXPIRED, "expired", 12)
    await store.store("a", *(answer(line) for line in lines))
    output = await store.read(batch.output_file_id)
    errors = await store.read(batch.error_file_id) if batch.error_file_id else []
    assert (len(output), len(errors)) == (batch.completed, batch.failed)
    assert len(await store.all(UsageRecord)) == batch.completed
    async with store.database.read() as session:
        assert await open_batches(session, store.now) == []


class LossyClock(StoreClock):
    """A clock that is read so many times; then the worker that reads it is lost."""

    def __init__(self, num_reads: int) -> None:
        super().__init__()
        self.num_reads = num_reads

    def __call__(self) -> ColumnElement[int]:
        self.num_reads -= 1
        if self.num_reads < 0:
            raise RuntimeError("lost")
        return super().__call__()


NUM_CHECKED = 701


async def create_checked(store: Store) -> None:
    """Create a batch of messages whose lines were validated before, more than the limits of today."""
    lines = [
        json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": "/v1/messages", "body": {}}).encode()
        for number in range(1, NUM_CHECKED + 1)
    ]
    content = b"".join(line + b"\n" for line in lines)
    async with store.database.write() as session:
        file = await begin_file(session, OWNER, "message_batch.jsonl")
        session.add(FileChunk(file_id=file.id, start=0, stop=len(content), data=content))
        file.purpose, file.state, file.num_bytes, file.object_key = "batch", FileState.READY, len(content), None
        await session.flush()
        new = NewBatch(input_file_id=file.id, endpoint="/v1/messages", completion_window="24h")
        limits = {"max_open": 9, "keep_files_s": None, "num_checked": NUM_CHECKED}
        store.batch_id = (await create_batch(session, OWNER, new, **limits, now=store.now)).id


async def import_checked(store: Store, now: StoreClock, *, closing: bool = False) -> None:
    async with store.database.read() as session:
        (found,) = [one for one in await open_batches(session, store.now) if one.id == store.batch_id]
    assert found.is_checked
    input_import = InputImport(store.database, store.contents, found, LIMITS, LEASE_MS, now)
    await (input_import.add_missing() if closing else input_import.run())


async def import_until_lost(store: Store, num_reads: int) -> None:
    """Create a checked batch, and import it until the worker is lost after so many reads of the clock."""
    await create_checked(store)
    with pytest.raises(RuntimeError, match="lost"):
        await import_checked(store, LossyClock(num_reads))


async def stored_numbers(store: Store) -> list[int]:
    return sorted(line.number for line in await store.all(BatchLine) if line.batch_id == store.batch_id)


@pytest.mark.parametrize("num_reads", [0, 1, 2, 3])
async def test_a_batch_whose_import_is_cut_off_is_whole_when_another_worker_has_it(
    store: Store, num_reads: int
) -> None:
    await import_until_lost(store, num_reads)
    batch = await store.batch()
    assert (batch.status, batch.total) == (BatchStatus.VALIDATING, NUM_CHECKED)
    assert await stored_numbers(store) == list(range(1, min(LINES_AT_ONCE * num_reads, NUM_CHECKED) + 1))
    await import_checked(store, store.now)
    batch = await store.batch()
    assert (batch.status, batch.total, batch.errors) == (BatchStatus.IN_PROGRESS, NUM_CHECKED, None)
    assert await stored_numbers(store) == list(range(1, NUM_CHECKED + 1))


@pytest.mark.parametrize("num_reads", [0, 2])
async def test_a_batch_that_is_cancelled_before_its_lines_are_stored_has_a_result_for_each(
    store: Store, num_reads: int
) -> None:
    await import_until_lost(store, num_reads)
    async with store.database.write() as session:
        await cancel_batch(session, OWNER.project_id, store.batch_id, store.now)
    await import_checked(store, store.now, closing=True)
    assert await store.close() is BatchStatus.CANCELLED
    ended = await store.batch()
    async with store.database.read() as session:
        (view,) = await views_of(session, [ended])
    counts = {"processing": 0, "succeeded": 0, "errored": 0, "canceled": NUM_CHECKED, "expired": 0}
    assert view["request_counts"] == counts
    assert [one["custom_id"] for one in await store.read(ended.error_file_id)] == [
        f"id-{number}" for number in range(1, NUM_CHECKED + 1)
    ]


async def test_an_uploaded_batch_that_is_cancelled_while_it_is_validated_counts_as_unchecked(store: Store) -> None:
    (first,) = await store.all(Batch)
    async with store.database.write() as session:
        new = NewBatch(input_file_id=first.input_file_id, endpoint=URL, completion_window="24h")
        batch = await create_batch(session, OWNER, new, max_open=9, keep_files_s=None, now=store.now)
        store.batch_id = batch.id

    async def found() -> OpenBatch:
        async with store.database.read() as session:
            return next(one for one in await open_batches(session, store.now) if one.id == store.batch_id)

    assert not (await found()).is_checked
    with pytest.raises(RuntimeError, match="lost"):
        await InputImport(store.database, store.contents, await found(), LIMITS, LEASE_MS, LossyClock(1)).run()
    async with store.database.write() as session:
        await cancel_batch(session, OWNER.project_id, store.batch_id, store.now)
        await fail_unanswered(session, store.batch_id)
    assert (await store.batch()).failed > 0 and not (await found()).is_checked
    assert await store.close() is BatchStatus.CANCELLED


async def test_a_batch_is_deleted_with_its_files(store: Store, database: Database) -> None:
    async with database.write() as session:
        (first,) = (await session.scalars(select(Batch))).all()
        new = NewBatch(input_file_id=first.input_file_id, endpoint=URL, completion_window="24h")
        store.batch_id = (await create_batch(session, OWNER, new, max_open=9, keep_files_s=None, now=store.now)).id
    async with database.read() as session:
        (found,) = [one for one in await open_batches(session, store.now) if one.id == store.batch_id]
    await InputImport(database, store.contents, found, LIMITS, LEASE_MS, store.now).run()
    with pytest.raises(Conflict, match="has not ended"):
        await delete_batch(database, store.batch_id, with_input=False)
    async with database.write() as session:
        await begin_closing(session, store.batch_id, BatchStatus.CANCELLED, CANCELLED, store.now)
    assert await store.close() is BatchStatus.CANCELLED
    ended = await store.batch()
    await delete_batch(database, store.batch_id, with_input=True)  # but another batch has the same input
    assert [one.id for one in await store.all(Batch)] == [first.id]
    assert {line.batch_id for line in await store.all(BatchLine)} == {first.id}
    states = {file.id: file.state for file in await store.all(StoredFile)}
    assert (states[str(ended.error_file_id)], states[first.input_file_id]) == (FileState.DELETED, FileState.READY)
    await delete_batch(database, store.batch_id, with_input=False)  # a repetition finds nothing to do

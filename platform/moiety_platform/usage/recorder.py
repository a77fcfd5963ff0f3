"""Usage recorder: it stores each row once and loses none, and no request waits for it.

`record` puts a row into memory; a task writes the collected rows after `interval_s`, and while rows keep coming after
two or four intervals (`write_pace.py`). The table's primary key makes writing idempotent, so rows in doubt are written
again.

When the database is away or slow: a batch that cannot be stored goes to the journal, an append-only file beside the
database's, and is replayed when the database is back, or at the next start. Once `max_pending` rows wait in memory,
further rows go to the journal directly. So memory is bounded, and journaled rows survive the process. If the journal
fails too (disk full), rows stay in memory up to `max_pending`, and each further row is written to the error log with
all its fields.

When the database refuses rows: each is tried alone, and only a row whose own values are proved to be the reason (see
rejected_rows.py) is quarantined. For any other error, the row goes to the journal and is retried.

When the process is killed: from the end of the current event-loop turn on, rows in memory are also in the live log, and
so are requests that have reached an engine; the next start stores the former unchanged and the latter as failed (see
`opened`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import structlog

from moiety_platform.db.session import Database
from moiety_platform.disk_full import store_advice
from moiety_platform.errors import Unavailable
from moiety_platform.usage.journal import Journal, LiveLog, Segment, to_line
from moiety_platform.usage.quarantined_rows import QuarantinedUsage
from moiety_platform.usage.rejected_rows import REFUSALS, accepts_plain_rows, is_value_error
from moiety_platform.usage.row import NOT_COLUMNS, UsageRow
from moiety_platform.usage.store import insert_rows
from moiety_platform.usage.write_pace import INTERVAL_S, WritePace

MAX_PENDING = 10_000
BATCH_ROWS = 1000
MAX_BACKOFF_S = 5.0
MAX_TEXT_LENGTH = 256

_FIELDS = tuple(name for name in UsageRow.__struct_fields__ if name not in NOT_COLUMNS)
_MAX_AMOUNT = 2**48  # limit, so that sums also fit into the database's types
_MAX_BYTES = 2**56  # more than any request reads: 72 PB; sums of them have columns of their own type (WideInteger)
_INT32_MAX = 2**31 - 1
_BYTES_FIELDS = frozenset({"expert_read_bytes", "expert_moved_bytes"})
_INT32_FIELDS = frozenset({"http_status", "num_choices", "num_preemptions"})
_names_of = attrgetter(
    "tenant_id", "project_id", "key_id", "endpoint", "model", "service_class", "outcome", "error_code"
)
_numbers_of = attrgetter(
    "http_status",
    "num_choices",
    "num_preemptions",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "cost_nanodollars",
    "speculative_tokens",
    "speculative_used_tokens",
    "credit_nanodollars",
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RecorderStats:
    """Counts since the recorder was created, and the current location of rows."""

    recorded: int
    stored: int  # handed to the database, including repeated rows
    journaled: int
    refused: int  # rows that the database will never take; kept in the journal's folder
    pending: int
    journal_waiting: bool
    oldest: datetime | None  # end of the request whose row has waited longest; None if no row waits


class UsageRecorder:
    """Recorder of one gateway process's usage. Create it in the event loop.

    Call `start` before the first request, `stop` after the last.
    """

    def __init__(
        self,
        database: Database,
        journal_dir: Path,
        *,
        interval_s: float = INTERVAL_S,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._database = database
        self._journal = Journal(journal_dir)
        self.quarantined_usage = QuarantinedUsage(journal_dir)
        self._live_log = LiveLog(journal_dir)
        self._unlogged: list[UsageRow] = []  # rows of the current turn of the event loop
        self._running: dict[str, UsageRow] = {}
        self._when_stored: dict[str, Callable[[], None]] = {}
        self._pace = WritePace(interval_s)
        self._max_pending = max_pending
        self._pending: deque[UsageRow] = deque()
        self._oldest_spilled: datetime | None = None  # of the rows in the journal, as far as this process knows
        self._draining = asyncio.Lock()
        self._work = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._recorded = self._stored = self._journaled = self._refused = 0

    async def start(self) -> None:
        """Start writing, first the rows that an earlier process left in the journal. Does not wait for the database."""
        await asyncio.to_thread(self._journal.open)
        if self._journal.waiting:
            self._oldest_spilled = datetime.now(UTC)  # its rows are older, by an unknown time
        self._work.set()
        self._task = asyncio.create_task(self._run(), name="usage-writer")

    async def stop(self) -> None:
        """Write every row to the database or, if that is away, to the journal. Idempotent."""
        self._stopping.set()
        self._work.set()
        if self._task is not None:
            await self._task
            self._task = None
        try:
            await self.flush()
        except (Unavailable, OSError) as error:
            _log.warning(
                "usage_left_in_journal",
                reason=str(error),
                journal_dir=str(self._journal.directory),
                advice="none needed: the next start of the gateway stores the rows",
            )
        for row in self._pending:  # only if the journal failed as well
            self._report_unstored(row, "stopped while database and journal were away")
        self._write_log()
        self._live_log.close(keep=bool(self._running or self._pending))
        self._pending.clear()
        await asyncio.to_thread(self._journal.close)

    def opened(self, row: UsageRow) -> None:
        """Register a request that has reached an engine; return at once and never raise.

        If the process is killed before the request's `record`, the next start stores `row` (see `KILLED`).
        """
        self._running[row.request_id] = row = storable(row)
        self._log(row)

    def record(self, row: UsageRow, when_stored: Callable[[], None] | None = None) -> None:
        """Record a row; return at once and never raise. Rows with the same `request_id` count once.

        `when_stored` is called once the row is in the database, if this process still lives then.
        """
        self._recorded += 1
        if when_stored is not None:
            self._when_stored[row.request_id] = when_stored
        row = storable(row)
        self._log(row)
        self._running.pop(row.request_id, None)
        if len(self._pending) >= self._max_pending:
            self._spill_one(row)
        else:
            self._pending.append(row)
        self._work.set()

    def holds(self, request_id: str) -> bool:
        """Return whether the request is running here, or its row waits to be stored."""
        return request_id in self._running or request_id in self._when_stored

    async def flush(self) -> None:
        """Store every row recorded before, then return.

        Raises Unavailable if the database is away; the rows are then in the journal and are stored later. Raises
        OSError if the journal cannot be read.
        """
        async with self._draining:
            await self._drain()

    def stats(self) -> RecorderStats:
        """Return counts, for metrics."""
        return RecorderStats(
            recorded=self._recorded,
            stored=self._stored,
            journaled=self._journaled,
            refused=self._refused,
            pending=len(self._pending),
            journal_waiting=self._journal.waiting,
            oldest=self._oldest_spilled or (_ended_at(self._pending[0]) if self._pending else None),
        )

    async def _run(self) -> None:
        backoff_s = 0.0
        while not self._stopping.is_set():
            if not backoff_s:
                await self._work.wait()
            self._work.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s or self._pace.pause_s())
            try:
                await self.flush()
            except (Unavailable, OSError) as error:
                if not backoff_s:
                    _log.warning(
                        "usage_store_unreachable",
                        reason=str(error),
                        journaled_rows=self._journaled,
                        advice=f"{store_advice(error)}; rows wait in the journal",
                    )
                backoff_s = min(MAX_BACKOFF_S, max(self._pace.interval_s, backoff_s * 2))
            else:
                if backoff_s:
                    _log.info("usage_store_recovered", stored_rows=self._stored)
                backoff_s = 0.0

    async def _drain(self) -> None:
        left = len(self._pending)  # later rows are for the next round
        self._pace.note_write(left)
        while left > 0:
            batch = [self._pending[i] for i in range(min(BATCH_ROWS, left))]
            try:
                kept = await self._store(batch)
            except Unavailable:
                await self._spill_pending()
                self._trim()
                raise
            if kept:
                await asyncio.to_thread(self._journal.append, kept, sync=True)
                self._note_spilled(kept[:1])
                self._journaled += len(kept)
            for _ in batch:
                self._pending.popleft()
            left -= len(batch)
            self._trim()
        if self._journal.waiting:
            await self._replay()

    def _log(self, row: UsageRow) -> None:
        """Write a row to the live log at the end of this event-loop turn, together with the turn's other rows."""
        self._unlogged.append(row)
        if len(self._unlogged) == 1:
            asyncio.get_running_loop().call_soon(self._write_log)

    def _write_log(self) -> None:
        rows, self._unlogged = self._unlogged, []
        if rows:
            self._live_log.add(rows)

    def _trim(self) -> None:
        self._write_log()
        self._live_log.trim([*self._running.values(), *self._pending])

    async def _replay(self) -> None:
        postponed: list[Segment] = []
        try:
            while (segment := await asyncio.to_thread(self._journal.claim)) is not None:
                if await self._replay_segment(segment):
                    postponed.append(segment)
        finally:
            for segment in postponed:
                self._journal.postpone(segment)
        if postponed:
            raise Unavailable(
                "The database rejects all usage rows, whatever their content; storing them is retried.",
                code="store_unavailable",
            )
        if not self._journal.waiting:
            self._oldest_spilled = None

    async def _replay_segment(self, segment: Segment) -> bool:
        """Store the rows of a segment; return whether some remain, in which case the segment stays claimed."""
        remain = False
        try:
            rows = await asyncio.to_thread(segment.read)
            for start in range(0, len(rows), BATCH_ROWS):
                remain |= bool(await self._store(rows[start : start + BATCH_ROWS]))
            if not remain:
                await asyncio.to_thread(segment.remove, self.quarantined_usage.add_damaged)
        finally:
            if not remain:
                segment.release()
        return remain

    async def _store(self, rows: Sequence[UsageRow]) -> list[UsageRow]:
        """Store rows, and quarantine those whose own values prevent it; return the rows to retry.

        The returned rows failed for another reason. Raises Unavailable.
        """
        error = await self._try_to_store(rows)
        if error is None:
            return []
        if not await accepts_plain_rows(self._database):
            raise Unavailable(
                f"The database cannot store usage rows ({_named(error)}); storing them is retried.",
                code="store_unavailable",
            ) from error
        if len(rows) > 1:
            middle = len(rows) // 2
            return await self._store(rows[:middle]) + await self._store(rows[middle:])
        error = await self._try_to_store(rows)
        if error is None:
            return []
        if not is_value_error(error):
            _log.error(
                "usage_row_kept_waiting",
                request_id=rows[0].request_id,
                error=_named(error),
                advice="restore the database; the row is stored again later",
            )
            return list(rows)
        folder = str(self.quarantined_usage.directory)
        _log.error(
            "usage_row_refused",
            request_id=rows[0].request_id,
            error=_named(error),
            journal_dir=folder,
            advice="write the row back with `moiety usage restore` once the cause is corrected",
        )
        await asyncio.to_thread(self.quarantined_usage.add_row, rows[0])
        self._refused += 1
        return []

    async def _try_to_store(self, rows: Sequence[UsageRow]) -> Exception | None:
        """Store all rows or none; return the error that prevented it, or None. Raises Unavailable."""
        try:
            async with self._database.write() as session:
                await insert_rows(session, rows)
        except REFUSALS as error:
            return error
        self._stored += len(rows)
        for row in rows:
            when_stored = self._when_stored.pop(row.request_id, None)
            if when_stored is not None:
                when_stored()
        return None

    async def _spill_pending(self) -> None:
        rows = list(self._pending)
        try:
            await asyncio.to_thread(self._journal.append, rows, sync=True)
        except OSError as error:
            _log.error(
                "usage_journal_failed",
                error=str(error),
                waiting_rows=len(rows),
                advice="check the free space and the permissions of the folder of the journal",
            )
            return
        for _ in rows:
            self._pending.popleft()
        self._note_spilled(rows[:1])
        self._journaled += len(rows)

    def _spill_one(self, row: UsageRow) -> None:
        try:
            self._journal.append([row], sync=False)
        except OSError as error:
            self._report_unstored(row, str(error))
            return
        self._note_spilled([row])
        self._journaled += 1

    def _note_spilled(self, rows: Sequence[UsageRow]) -> None:
        for row in rows:
            self._oldest_spilled = self._oldest_spilled or _ended_at(row)

    def _report_unstored(self, row: UsageRow, reason: str) -> None:
        _log.error(
            "usage_row_unstored", reason=reason, row=to_line(row).decode(), advice="restore the row from this line"
        )


def _named(error: Exception) -> str:
    """Return the error's type name only, since its text may contain the rows."""
    return type(getattr(error, "orig", None) or error).__name__


def _ended_at(row: UsageRow) -> datetime:
    return row.started_at + timedelta(milliseconds=row.duration_ms)


def storable(row: UsageRow) -> UsageRow:
    """Return the row with values that every database accepts.

    It replaces NUL and lone surrogates in texts, over-long texts, and numbers that are not finite or too large. Any
    other row is returned unchanged.
    """
    name, numbers = row.request_id, _numbers_of(row)
    times = row.queue_ms or 0.0, row.ttft_ms or 0.0, row.duration_ms or 0.0
    predicted = row.predicted_ttft_ms or 0.0, row.predicted_duration_ms or 0.0
    is_storable = (  # few and cheap checks, since each row is checked twice
        name.isascii()
        and name.isprintable()
        and len(name) <= MAX_TEXT_LENGTH
        and ((row.end_user is None and row.route is None) or _are_plain(row.end_user, row.route))
        and _are_plain_names(*_names_of(row))
        and min(numbers) >= 0
        and max(numbers) <= _INT32_MAX
        and 0 <= row.expert_read_bytes <= _MAX_BYTES
        and 0 <= row.expert_moved_bytes <= _MAX_BYTES
        and min(*times, *predicted) >= 0.0
        and sum(times) + sum(predicted) <= _MAX_AMOUNT  # false if one of the times is NaN
    )
    if is_storable:
        return row
    changes: dict[str, Any] = {}
    for name in set(_FIELDS) - {"tags"}:  # tags are made by us: printable, and bounded
        value = getattr(row, name)
        clean = _clean(name, value)
        if clean is not value:
            changes[name] = clean
    return msgspec.structs.replace(row, **changes) if changes else row


@functools.lru_cache(maxsize=4096)
def _are_plain_names(*names: str | None) -> bool:
    """Return whether the names are plain; cached, since many requests share them."""
    return _are_plain(*names)


def _are_plain(*texts: str | None) -> bool:
    given = [text for text in texts if text]
    whole = "".join(given)
    return whole.isascii() and whole.isprintable() and max(map(len, given), default=0) <= MAX_TEXT_LENGTH


def _clean(name: str, value: Any) -> Any:
    if isinstance(value, str):
        if value.isascii() and value.isprintable() and len(value) <= MAX_TEXT_LENGTH:
            return value
        whole = value[:MAX_TEXT_LENGTH].encode("utf-8", "replace").decode()
        return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in whole)
    if isinstance(value, float) and not abs(value) <= _MAX_AMOUNT:  # also NaN
        return 0.0 if name == "duration_ms" else None
    if isinstance(value, int):
        bound = _INT32_MAX if name in _INT32_FIELDS else _MAX_BYTES if name in _BYTES_FIELDS else _MAX_AMOUNT
        return value if -bound <= value <= bound else min(max(value, -bound), bound)
    return value

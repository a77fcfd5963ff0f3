"""Charging of usage that an engine counted and no gateway has stored, because the requesting gateway died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.quota.kinds import Unit
from moiety_platform.quota.store import book
from moiety_platform.usage.billing_context import BillingContext, decode_bill, request_of, sequence_of
from moiety_platform.usage.ledger_entries import COUNTS, correct, metered_before
from moiety_platform.usage.models import EntryKind, UsageRecord
from moiety_platform.usage.recorder import storable
from moiety_platform.usage.row import GATEWAY_KILLED, UsageRow
from moiety_platform.usage.store import change_row, insert_rows, row_of
from moiety_wire.messages import MeteredUsage

MAX_WAITING = 64  # messages; an engine resends what was not settled

log = structlog.get_logger(__name__)

Tell = Callable[[str, list[str]], None]  # (gateway process, its requests): they are settled


class MeterReader:
    """Reader of engines' usage records of dead gateways: store and acknowledge them. Create it in the event loop."""

    def __init__(self, database: Database, is_held: Callable[[str], bool]) -> None:
        """Create the reader; `is_held` returns whether this process has a request, and will store its row itself."""
        self._database = database
        self._is_held = is_held
        self._waiting: asyncio.Queue[tuple[Sequence[MeteredUsage], Tell]] = asyncio.Queue(MAX_WAITING)
        self._task: asyncio.Task[None] | None = None
        self.num_charged = 0

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="meter-reader")

    async def stop(self) -> None:
        """Stop; waiting records stay at the engines, which send them to another gateway."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    def take(self, records: Sequence[MeteredUsage], tell: Tell) -> None:
        """Queue records of one engine; `tell` acknowledges them when they are stored.

        Never waits; a full queue drops the records.
        """
        if not self._waiting.full():
            self._waiting.put_nowait((records, tell))

    async def _run(self) -> None:
        while True:
            records, tell = await self._waiting.get()
            for record in records:
                if self._is_held(request_of(record.request_id)):
                    continue
                try:
                    async with self._database.write() as session:
                        self.num_charged += await charge(session, record)
                except Unavailable as error:
                    log.warning(
                        "metered_usage_waits",
                        reason=str(error),
                        num_records=len(records),
                        advice="restore the connection to the database; the engine sends the usage again",
                    )
                    break
                except Exception:  # last resort of the task: log it; the engine keeps the record
                    log.exception("metered_usage_not_stored", request_id=record.request_id)
                    continue
                tell(record.replica_id, [record.request_id])


async def charge(session: AsyncSession, record: MeteredUsage) -> bool:
    """Bill the request once for what the engine counted; return whether this call did.

    Returns False if its gateway had stored it after all, or the record is known. Raises msgspec.MsgspecError for an
    invalid billing context.
    """
    try:
        bill = decode_bill(record.billing_context)
    except msgspec.MsgspecError:
        log.error(
            "billing_context_undecodable",
            request_id=record.request_id,
            num_bytes=len(record.billing_context),
            advice="run the same release of all gateways; this usage is not billed",
        )
        raise
    await insert_rows(session, [storable(bill.row)])
    found = select(UsageRecord).where(UsageRecord.request_id == bill.row.request_id).with_for_update()
    stored = (await session.scalars(found)).one_or_none()
    if stored is None or stored.error_code != GATEWAY_KILLED:  # None: the row is so old that it was deleted
        return False
    before = row_of(stored)
    sequence = sequence_of(record.request_id)
    num_counts, num_tokens = await metered_before(session, before.request_id, sequence)
    if num_counts and num_tokens >= record.num_output_tokens:
        # If two engines worked on an answer, each counts all positions up to its own end. A record does not name its
        # engine, so this one may be a repeated one: its expert bytes are not added either (docs/experts.md).
        return False
    more = msgspec.structs.replace(record, num_output_tokens=record.num_output_tokens - num_tokens)
    has_prompt = sequence % bill.num_choices == 0 and not num_counts
    after = _with_count(before, bill, more, has_prompt=has_prompt)
    await correct(session, EntryKind.METERED, sequence + COUNTS * num_counts, before, after)
    await change_row(session, after)
    cost = after.cost_nanodollars - before.cost_nanodollars
    await book(session, bill.charges({Unit.TOKENS: more.num_output_tokens, Unit.MONEY: cost}))
    return True


def _with_count(row: UsageRow, bill: BillingContext, record: MeteredUsage, *, has_prompt: bool) -> UsageRow:
    """Return the request with one answer's tokens added.

    Of several answers to a prompt, the first has its cache hits.
    """
    cached = row.cached_tokens + (record.num_cached_tokens if has_prompt else 0)
    output = row.output_tokens + record.num_output_tokens
    return msgspec.structs.replace(
        row,
        service_class=record.served_class,
        cached_tokens=cached,
        output_tokens=output,
        expert_read_bytes=row.expert_read_bytes + record.expert_read_bytes,
        expert_moved_bytes=row.expert_moved_bytes + record.expert_moved_bytes,
        cost_nanodollars=bill.cost(record.served_class, row.prompt_tokens, cached, output),
    )

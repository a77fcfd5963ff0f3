"""Storage of line outcomes: the answer, the usage row with its charges, and the batch's counts in one transaction.

So a line is billed if and only if its answer is in the output file, even if processes are killed. The first answer of a
line counts. If two workers have answered the same line (one was silent for longer than its lease), or the batch ended
before the answer arrived, the other answer is dropped: its tokens are charged to limits, since they were generated, but
not billed. Rows are locked in the same order everywhere: lines, batches, usage, limits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import bindparam, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.batches.claims import ClaimedLine, LineKey
from moiety_platform.batches.models import Batch, BatchLine, BatchStatus, LineState
from moiety_platform.files.store import Now, read_clock
from moiety_platform.usage.recorder import storable
from moiety_platform.usage.row import UsageRow
from moiety_platform.usage.store import insert_rows

SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """A line that has ended, with an answer or without."""

    line: ClaimedLine
    state: LineState
    answer: bytes  # its line in the output or error file
    row: UsageRow | None  # None if it failed before it became a request


@dataclass(frozen=True, slots=True)
class RequeuedLine:
    """A line to retry after a while."""

    line: ClaimedLine
    wait_s: float
    num_refusals: int
    num_failures: int
    by_limit: bool = False  # a limit of its key refused it


async def store_outcomes(
    session: AsyncSession, owner: str, answered: Sequence[AnsweredLine], put_back: Sequence[RequeuedLine], now: Now
) -> None:
    """Store all outcomes, each once.

    An outcome that an earlier transaction stored, whose commit is in doubt, is left unchanged.
    """
    states = await _lock(session, [*(one.line for one in answered), *(one.line for one in put_back)])
    pending = {one.line.key: one for one in reversed(answered) if _state(states, one)[0] == LineState.PENDING}
    first = list(pending.values())
    waiting = [
        one for one in put_back if _state(states, one) == (LineState.PENDING, owner) and one.line.key not in pending
    ]
    connection = await session.connection()
    here = BatchLine.batch_id == bindparam("of"), BatchLine.number == bindparam("at")
    if first:
        ended: dict[str, Any] = {name: bindparam(f"new_{name}") for name in ("state", "answer", "answer_bytes")}
        await connection.execute(
            update(BatchLine.__table__).where(*here).values(owner=owner, **ended),  # type: ignore[arg-type]
            [
                {
                    "of": one.line.batch.id,
                    "at": one.line.number,
                    "new_state": one.state.value,
                    "new_answer": one.answer,
                    "new_answer_bytes": len(one.answer) + 1,  # including the line's end
                }
                for one in first
            ],
        )
        await _count(session, first, now)
    if waiting:
        moment = await read_clock(session, now)
        tried: dict[str, Any] = {
            name: bindparam(f"new_{name}") for name in ("available_ms", "num_refusals", "num_failures")
        }
        await connection.execute(
            update(BatchLine.__table__).where(*here).values(owner=None, **tried),  # type: ignore[arg-type]
            [
                {
                    "of": one.line.batch.id,
                    "at": one.line.number,
                    "new_available_ms": moment + round(one.wait_s * 1000),
                    "new_num_refusals": one.num_refusals,
                    "new_num_failures": one.num_failures,
                }
                for one in waiting
            ],
        )
    await _bill(session, owner, answered, first, states)


States = dict[LineKey, tuple[str, str | None]]


def _state(states: States, outcome: AnsweredLine | RequeuedLine) -> tuple[str, str | None]:
    """Return the state and the owner of the line as it was found."""
    return states.get(outcome.line.key, ("", None))


async def _lock(session: AsyncSession, lines: Sequence[ClaimedLine]) -> States:
    """Return the state and the owner of each line; the lines stay locked until the end of the transaction."""
    columns = BatchLine.batch_id, BatchLine.number
    wanted = tuple_(*columns).in_([line.key for line in lines])
    statement = select(*columns, BatchLine.state, BatchLine.owner).where(wanted).order_by(*columns).with_for_update()
    rows = await session.execute(statement)
    return {(batch_id, number): (state, owner) for batch_id, number, state, owner in rows}


async def _count(session: AsyncSession, ended: Sequence[AnsweredLine], now: Now) -> None:
    """Add to the batches' counts; finalize a batch whose lines have all ended."""
    by_batch: dict[str, list[AnsweredLine]] = defaultdict(list)
    for one in ended:
        by_batch[one.line.batch.id].append(one)
    for batch_id, ones in sorted(by_batch.items()):
        billed = [one.row for one in ones if one.row is not None and one.state is LineState.COMPLETED]
        num_completed = sum(one.state is LineState.COMPLETED for one in ones)
        changes = {
            "completed": Batch.completed + num_completed,
            "failed": Batch.failed + len(ones) - num_completed,
            "prompt_tokens": Batch.prompt_tokens + sum(row.prompt_tokens for row in billed),
            "cached_tokens": Batch.cached_tokens + sum(row.cached_tokens for row in billed),
            "output_tokens": Batch.output_tokens + sum(row.output_tokens for row in billed),
        }
        await session.execute(update(Batch).where(Batch.id == batch_id).values(changes))
        done = Batch.completed + Batch.failed == Batch.total, Batch.status == BatchStatus.IN_PROGRESS
        await session.execute(
            update(Batch)
            .where(Batch.id == batch_id, *done)
            .values(
                status=BatchStatus.FINALIZING, finalizing_ms=now(), closing_as=BatchStatus.COMPLETED, available_ms=0
            )
        )


async def _bill(
    session: AsyncSession,
    owner: str,
    answered: Sequence[AnsweredLine],
    first: Sequence[AnsweredLine],
    states: States,
) -> None:
    """Store the usage rows of counted answers, and of dropped answers those with charges."""
    rows = [one.row for one in first if one.row is not None]
    counted = {one.line.key for one in first}
    for one in answered:
        was_stored_here = _state(states, one)[1] == owner
        if one.line.key not in counted and not was_stored_here and one.row is not None and one.row.charges:
            rows.append(_superseded(one.row, owner))
    if rows:
        await insert_rows(session, [storable(row) for row in rows])


def _superseded(row: UsageRow, owner: str) -> UsageRow:
    """Return the row under an id of its own, so that it is stored once as well, and without billed amounts."""
    return msgspec.structs.replace(
        row,
        request_id=f"{row.request_id}-{owner}",
        outcome="failed",
        error_code=SUPERSEDED,
        prompt_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        cost_nanodollars=0,
        slo_attained=None,
        receipt=None,
    )

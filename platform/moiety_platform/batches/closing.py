"""Closing of batches, within the caller's transaction: the reason, the errors of unanswered lines, the result files.

A batch is closed in steps, each of which may be repeated: first its end is recorded, then its unanswered lines get
their errors, some at a time, and finally its files and its last status are set in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.batches.answers import line_key, unanswered
from moiety_platform.batches.models import Batch, BatchLine, BatchStatus, LineState
from moiety_platform.files.models import FileState, StoredFile
from moiety_platform.files.store import Now, read_clock
from moiety_platform.tenants.checks import new_id

OUTPUT_PURPOSE = "batch_output"
LINES_AT_ONCE = 500

EXPIRED = {
    "code": "batch_expired",
    "message": "this request was not answered before the batch's completion window was over",
}

CLOSABLE = (BatchStatus.FINALIZING, BatchStatus.CANCELLING)


async def begin_closing(
    session: AsyncSession, batch_id: str, ends_as: BatchStatus, error: Mapping[str, str], now: Now
) -> bool:
    """Start to close a running batch; return False if it is closing already.

    The lines without an answer get this error. If the batch fails, the error is the batch's own as well.
    """
    running = Batch.id == batch_id, Batch.status.in_((BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS))
    values: dict[str, Any] = {
        "status": BatchStatus.FINALIZING,
        "finalizing_ms": now(),
        "closing_as": ends_as,
        "closing_error": dict(error),
        "available_ms": 0,
    }
    if ends_as is BatchStatus.FAILED:
        values["errors"] = [{**error, "line": None, "param": None}]
    return await session.scalar(update(Batch).where(*running).values(values).returning(Batch.id)) is not None


async def fail_unanswered(session: AsyncSession, batch_id: str) -> bool:
    """Give some of the lines without an answer their error; return whether none is left."""
    batch = await session.get(Batch, batch_id)
    pending = BatchLine.batch_id == batch_id, BatchLine.state == LineState.PENDING
    wanted = select(BatchLine.number, BatchLine.custom_id).where(*pending).order_by(BatchLine.number)
    rows = (await session.execute(wanted.limit(LINES_AT_ONCE).with_for_update())).all()
    if not rows or batch is None or batch.status not in CLOSABLE:
        return True
    assert batch.closing_error is not None, "a batch is completed when every line has come to its end"
    answers = [
        (number, unanswered(line_key(batch_id, number), custom_id, batch.closing_error)) for number, custom_id in rows
    ]
    connection = await session.connection()
    values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in ("answer", "answer_bytes")}
    await connection.execute(
        update(BatchLine.__table__)  # type: ignore[arg-type]
        .where(BatchLine.batch_id == batch_id, BatchLine.number == bindparam("at"))
        .values(state=LineState.FAILED, owner=None, **values),
        [{"at": number, "new_answer": answer, "new_answer_bytes": len(answer) + 1} for number, answer in answers],
    )
    total = Batch.completed + Batch.failed + len(rows)  # not known before, if the batch was still being validated
    await session.execute(
        update(Batch)
        .where(Batch.id == batch_id)
        .values(
            failed=Batch.failed + len(rows),
            total=func.max(Batch.total, total) if _is_sqlite(session) else func.greatest(Batch.total, total),
        )
    )
    return len(rows) < LINES_AT_ONCE


async def close_batch(session: AsyncSession, batch_id: str, now: Now) -> BatchStatus | None:
    """Create the result files of a batch whose lines have all ended, and set its last status; return the status.

    Returns None, and does nothing, if another worker has closed it, or a line is still pending.
    """
    batch = await session.get(Batch, batch_id, with_for_update=True)
    if batch is None or batch.status not in CLOSABLE:
        return None
    sums = (
        select(BatchLine.state, func.sum(BatchLine.answer_bytes))
        .where(BatchLine.batch_id == batch_id)
        .group_by(BatchLine.state)
    )
    sizes: dict[str, int] = {state: int(size) for state, size in await session.execute(sums)}
    if LineState.PENDING in sizes:
        return None
    moment = await read_clock(session, now)
    ends_as = BatchStatus(batch.closing_as or BatchStatus.COMPLETED)
    batch.output_file_id = _add_file(session, batch, LineState.COMPLETED, "output", sizes, moment)
    batch.error_file_id = _add_file(session, batch, LineState.FAILED, "errors", sizes, moment)
    batch.total = batch.completed + batch.failed
    batch.status = ends_as
    setattr(batch, f"{ends_as.value}_ms", moment)
    await session.flush()
    return ends_as


async def refuse_batch(session: AsyncSession, batch_id: str, errors: Sequence[dict[str, Any]], now: Now) -> bool:
    """Fail a batch whose input file is invalid: no line is processed.

    Returns False if the batch is not validating any more.
    """
    validating = Batch.id == batch_id, Batch.status == BatchStatus.VALIDATING
    values = {"status": BatchStatus.FAILED, "failed_ms": now(), "errors": list(errors), "total": 0}
    return await session.scalar(update(Batch).where(*validating).values(values).returning(Batch.id)) is not None


def _add_file(
    session: AsyncSession, batch: Batch, state: LineState, name: str, sizes: Mapping[str, int], moment: int
) -> str | None:
    """Add a file that consists of the answers of the lines in a state; return its id, or None if there are none."""
    if state not in sizes:
        return None
    file = StoredFile(
        id=new_id("file"),
        tenant_id=batch.tenant_id,
        project_id=batch.project_id,
        purpose=OUTPUT_PURPOSE,
        filename=f"{batch.id}_{name}.jsonl",
        state=FileState.READY,
        num_bytes=sizes[state],
        created_ms=moment,
        touched_ms=moment,
        expires_ms=None if batch.output_expires_s is None else moment + batch.output_expires_s * 1000,
        batch_id=batch.id,
        line_state=state,
    )
    session.add(file)
    return file.id


def _is_sqlite(session: AsyncSession) -> bool:
    return session.get_bind().dialect.name == "sqlite"

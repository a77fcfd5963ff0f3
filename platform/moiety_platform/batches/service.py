"""Operations on batches: create, find, list and cancel, within the caller's transaction. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.principal import Principal
from moiety_platform.batches.models import OPEN, Batch, BatchStatus
from moiety_platform.batches.schemas import WINDOW_MS, NewBatch
from moiety_platform.db.keyset import ListRequest, read_list
from moiety_platform.db.now import now_ms
from moiety_platform.errors import BadRequest, Conflict, NotFound, RateLimited
from moiety_platform.files.store import Now, get_file, read_clock
from moiety_platform.files.upload import BATCH_PURPOSE
from moiety_platform.tenants.checks import is_id, new_id

CANCELLED = {"code": "batch_cancelled", "message": "the batch was cancelled before this request was answered"}
RETRY_S = 60.0


async def create_batch(
    session: AsyncSession,
    owner: Principal,
    new: NewBatch,
    *,
    max_open: int,
    keep_files_s: int | None,
    num_checked: int = 0,
    now: Now = now_ms,
) -> Batch:
    """Create a batch, which is validated next, or imported if its `num_checked` lines were validated before.

    Raises NotFound for an unknown file, BadRequest, or RateLimited if the tenant has too many batches that have not
    ended.
    """
    file = await get_file(session, owner.project_id, new.input_file_id, lock=True, now=now)
    if file.purpose != BATCH_PURPOSE:
        raise BadRequest(
            f"the file's purpose is {file.purpose!r}; upload one with the purpose '{BATCH_PURPOSE}'",
            param="input_file_id",
        )
    open_ones = Batch.tenant_id == owner.tenant_id, Batch.status.in_(OPEN)
    if (await session.scalar(select(func.count()).select_from(Batch).where(*open_ones)) or 0) >= max_open:
        raise RateLimited(
            f"{max_open} batches of this tenant have not ended yet; wait for one, or put more lines into one",
            code="too_many_batches",
            retry_after_s=RETRY_S,
        )
    moment = await read_clock(session, now)
    batch = Batch(
        id=new_id("batch"),
        tenant_id=owner.tenant_id,
        project_id=owner.project_id,
        key_id=owner.key_id,
        end_user=owner.end_user,
        endpoint=new.endpoint,
        input_file_id=file.id,
        note=new.metadata,
        output_expires_s=new.output_expires_s or keep_files_s,
        status=BatchStatus.VALIDATING,
        total=num_checked,
        **dict.fromkeys(("completed", "failed", "prompt_tokens", "cached_tokens", "output_tokens"), 0),
        available_ms=0,
        created_ms=moment,
        expires_ms=moment + WINDOW_MS,
    )
    session.add(batch)
    await session.flush()
    return batch


async def get_batch(session: AsyncSession, project_id: str, batch_id: str, *, lock: bool = False) -> Batch:
    """Return a batch of the project. Raises NotFound."""
    statement = select(Batch).where(Batch.id == batch_id, Batch.project_id == project_id)
    if lock:
        statement = statement.with_for_update()
    batch = (await session.scalars(statement)).first() if is_id(batch_id) else None
    if batch is None:
        raise NotFound(
            f"there is no batch {batch_id[:64]!r} in this key's project; list them with GET /v1/batches",
            code="batch_not_found",
            param="batch_id",
        )
    return batch


async def list_batches(
    session: AsyncSession, project_id: str, list_request: ListRequest
) -> tuple[Sequence[Batch], bool]:
    """Return the project's batches, newest first, and whether more follow.

    Raises BadRequest for an unknown position.
    """
    statement = select(Batch).where(Batch.project_id == project_id)
    return await read_list(session, statement, list_request, Batch.created_ms, Batch.id)


async def cancel_batch(session: AsyncSession, project_id: str, batch_id: str, now: Now = now_ms) -> Batch:
    """Cancel a batch: answer no more of its lines; existing answers stay. Cancelling again changes nothing.

    Raises NotFound, or Conflict for a batch that has ended.
    """
    batch = await get_batch(session, project_id, batch_id, lock=True)
    if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
        batch.status, batch.cancelling_ms = BatchStatus.CANCELLING, await read_clock(session, now)
        batch.closing_as, batch.closing_error = BatchStatus.CANCELLED, CANCELLED
        batch.available_ms = 0
        await session.flush()
    elif batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
        raise Conflict(f"the batch is {batch.status.replace('_', ' ')}; there is nothing to cancel", code="batch_over")
    return batch

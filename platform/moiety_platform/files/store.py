"""Rows of files within the caller's transaction. Independent of HTTP, and of where contents are.

A file grows while it is uploaded, then it is published; deletion hides it at once, and its content is erased later. No
transaction lasts longer for a larger file: on SQLite it blocks all other writers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.principal import Principal
from moiety_platform.db.keyset import ListRequest, read_list
from moiety_platform.db.now import now_ms
from moiety_platform.errors import Conflict, NotFound, TooLarge
from moiety_platform.files.models import MAX_FILENAME_LENGTH, FileState, StoredFile
from moiety_platform.object_storage.keys import file_key
from moiety_platform.tenants.checks import is_id, new_id

ABANDONED_MS = 3600 * 1000  # an upload without an addition for this long is abandoned
ENDS_AT_ONCE = 500

Now = Callable[[], ColumnElement[int]]


async def read_clock(session: AsyncSession, now: Now = now_ms) -> int:
    """Return Unix milliseconds of the database's clock."""
    return int(await session.scalar(select(now())) or 0)


async def begin_file(session: AsyncSession, owner: Principal, filename: str, now: Now = now_ms) -> StoredFile:
    """Create an empty file that is not visible yet, with the key of its object."""
    moment = await read_clock(session, now)
    file_id = new_id("file")
    file = StoredFile(
        id=file_id,
        tenant_id=owner.tenant_id,
        project_id=owner.project_id,
        purpose="",
        filename=_clean(filename),
        state=FileState.UPLOADING,
        num_bytes=0,
        created_ms=moment,
        touched_ms=moment,
        object_key=file_key(owner.tenant_id, file_id),
    )
    session.add(file)
    await session.flush()
    return file


async def grow_file(
    session: AsyncSession, file_id: str, num_bytes: int, *, max_tenant_bytes: int, now: Now = now_ms
) -> None:
    """Count the bytes of an upload before they are stored.

    Raises Conflict, or TooLarge where the tenant's storage is full.
    """
    mine = StoredFile.id == file_id, StoredFile.state == FileState.UPLOADING
    grown = update(StoredFile).where(*mine).values(num_bytes=num_bytes, touched_ms=now())
    tenant_id = await session.scalar(grown.returning(StoredFile.tenant_id))
    if tenant_id is None:
        raise Conflict("the upload was aborted, because no data arrived for too long; upload the file again")
    kept = StoredFile.tenant_id == tenant_id, StoredFile.state != FileState.DELETED
    total = await session.scalar(select(func.sum(StoredFile.num_bytes)).where(*kept))
    if int(total or 0) > max_tenant_bytes:
        raise TooLarge(
            f"your files would be larger than {max_tenant_bytes:,} bytes together; delete some, then upload again",
            code="file_storage_full",
        )


async def publish_file(
    session: AsyncSession, file_id: str, purpose: str, digest: str, expires_s: int | None
) -> StoredFile:
    """Make the upload visible, for `expires_s` from its beginning. Raises Conflict where it was swept meanwhile.

    `digest` is the SHA-256 of the stored object.
    """
    file = await session.get(StoredFile, file_id, with_for_update=True)
    if file is None or file.state != FileState.UPLOADING:
        raise Conflict("the upload was aborted, because no data arrived for too long; upload the file again")
    file.purpose, file.digest, file.state = purpose, digest, FileState.READY
    if expires_s is not None:
        file.expires_ms = file.created_ms + expires_s * 1000
    await session.flush()
    return file


async def discard_upload(session: AsyncSession, file_id: str) -> bool:
    """Discard an upload; return False if it is published, by a commit whose outcome was in doubt."""
    mine = StoredFile.id == file_id, StoredFile.state == FileState.UPLOADING
    await session.execute(update(StoredFile).where(*mine).values(state=FileState.DELETED))
    return await session.scalar(select(StoredFile.state).where(StoredFile.id == file_id)) != FileState.READY


async def get_file(
    session: AsyncSession, project_id: str, file_id: str, *, lock: bool = False, now: Now = now_ms
) -> StoredFile:
    """Return a file of the project. Raises NotFound.

    With `lock` it cannot be deleted before the transaction ends.
    """
    statement = select(StoredFile).where(StoredFile.id == file_id, *_visible(project_id, now))
    if lock:
        statement = statement.with_for_update().execution_options(populate_existing=True)
    file = (await session.scalars(statement)).first() if is_id(file_id) else None
    if file is None:
        raise NotFound(
            f"there is no file {file_id[:64]!r} in this key's project; list them with GET /v1/files",
            code="file_not_found",
            param="file_id",
        )
    return file


async def list_files(
    session: AsyncSession, project_id: str, list_request: ListRequest, purpose: str | None, now: Now = now_ms
) -> tuple[Sequence[StoredFile], bool]:
    """Return the project's files, and whether more follow. Raises BadRequest for an invalid position."""
    statement = select(StoredFile).where(*_visible(project_id, now))
    if purpose is not None:
        statement = statement.where(StoredFile.purpose == purpose)
    return await read_list(session, statement, list_request, StoredFile.created_ms, StoredFile.id)


async def lock_erasable(session: AsyncSession, is_needed: ColumnElement[bool], now: Now = now_ms) -> StoredFile | None:
    """Lock and return a file that is no longer visible; None where there is none.

    It is deleted, expired and not needed, or an abandoned upload. Only the caller can change it before the transaction
    ends.
    """
    moment = await read_clock(session, now)
    abandoned = (StoredFile.state == FileState.UPLOADING) & (StoredFile.touched_ms < moment - ABANDONED_MS)
    over = or_(StoredFile.expires_ms <= moment, abandoned) & ~is_needed
    for condition in (StoredFile.state == FileState.DELETED, over):  # one by one, so that an index serves each
        statement = select(StoredFile).where(condition).limit(1).with_for_update(of=StoredFile, skip_locked=True)
        file = (await session.scalars(statement)).first()
        if file is not None:
            return file
    return None


async def set_expiry(session: AsyncSession, *, keep_s: int, now: Now = now_ms) -> int:
    """Set an expiry time, `keep_s` from now, on some files that have none. Return their number.

    These files were created while no bound was configured.
    """
    endless = StoredFile.state == FileState.READY, StoredFile.expires_ms.is_(None)
    statement = select(StoredFile.id).where(*endless).limit(ENDS_AT_ONCE).with_for_update(skip_locked=True)
    ids = (await session.scalars(statement)).all()
    await session.execute(update(StoredFile).where(StoredFile.id.in_(ids)).values(expires_ms=now() + keep_s * 1000))
    return len(ids)


def _visible(project_id: str, now: Now) -> tuple[ColumnElement[bool], ...]:
    return (
        StoredFile.project_id == project_id,
        StoredFile.state == FileState.READY,
        or_(StoredFile.expires_ms.is_(None), StoredFile.expires_ms > now()),
    )


def _clean(filename: str) -> str:
    """Return the name in the table's form: no path, no control characters, bounded length."""
    name = filename.replace("\\", "/").rpartition("/")[2].encode("utf-8", "replace").decode()
    return "".join(char if char.isprintable() else "_" for char in name)[:MAX_FILENAME_LENGTH] or "upload"

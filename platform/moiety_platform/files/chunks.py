"""Contents of version 0.1.0 in SQL, within the caller's transaction: they are read to move, and erased."""

from __future__ import annotations

from sqlalchemy import ColumnElement, delete, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.files.models import FileChunk, StoredFile

ERASE_CHUNKS = 64  # per transaction


async def read_chunk(session: AsyncSession, file_id: str, start: int) -> bytes:
    """Return the chunk that begins at `start`; empty at the end of the file."""
    here = FileChunk.file_id == file_id, FileChunk.start == start
    return await session.scalar(select(FileChunk.data).where(*here)) or b""


async def erase_chunks(session: AsyncSession, file_id: str) -> int:
    """Erase a few chunks of a file; return their number."""
    return await _erase(session, FileChunk.file_id == file_id)


async def erase_moved_chunks(session: AsyncSession) -> int:
    """Erase a few chunks of files whose content is an object; return their number."""
    moved = select(StoredFile.id).where(StoredFile.object_key.is_not(None))
    return await _erase(session, FileChunk.file_id.in_(moved))


async def _erase(session: AsyncSession, condition: ColumnElement[bool]) -> int:
    key = FileChunk.file_id, FileChunk.start
    found = [tuple(row) for row in await session.execute(select(*key).where(condition).limit(ERASE_CHUNKS))]
    if found:
        await session.execute(delete(FileChunk).where(tuple_(*key).in_(found)))
    return len(found)

"""Contents of version 0.1.0 in SQL, within the caller's transaction: they are read to move, and erased."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.deletion import delete_some
from moiety_platform.files.models import FileChunk, StoredFile

ERASE_CHUNKS = 64  # per transaction
_KEY = FileChunk.file_id, FileChunk.start


async def read_chunk(session: AsyncSession, file_id: str, start: int) -> bytes:
    """Return the chunk that begins at `start`; empty at the end of the file."""
    here = FileChunk.file_id == file_id, FileChunk.start == start
    return await session.scalar(select(FileChunk.data).where(*here)) or b""


async def erase_chunks(session: AsyncSession, file_id: str) -> int:
    """Erase a few chunks of a file; return their number."""
    return await delete_some(session, _KEY, FileChunk.file_id == file_id, ERASE_CHUNKS)


async def erase_moved_chunks(session: AsyncSession) -> int:
    """Erase a few chunks of files whose content is an object; return their number."""
    moved = select(StoredFile.id).where(StoredFile.object_key.is_not(None))
    return await delete_some(session, _KEY, FileChunk.file_id.in_(moved), ERASE_CHUNKS)

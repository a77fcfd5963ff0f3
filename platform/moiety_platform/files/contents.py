"""Contents of files: objects and, until they have moved to the object store, answers of batches and chunks in SQL.

The row of a file exists before its object and is deleted after it, so that every object has a row that says whose it
is. No transaction is open while the object store is asked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

import structlog
from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import Gone
from moiety_platform.files.chunks import erase_chunks, erase_moved_chunks, read_chunk
from moiety_platform.files.derived import FileUsers
from moiety_platform.files.models import FileState, StoredFile
from moiety_platform.files.store import Now, lock_erasable
from moiety_platform.object_storage.keys import file_key
from moiety_platform.object_storage.store import PIECE_BYTES, ObjectMissing, ObjectStore

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FileContents:
    """Contents of all tenants' files, for one gateway process. Methods raise Unavailable while a store is away."""

    database: Database
    objects: ObjectStore
    users: FileUsers
    now: Now = now_ms
    incomplete: set[str] = field(default_factory=set)  # files in SQL that lack a part, and are not moved

    async def read(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """Yield the content piece by piece. Raises Gone if it is missing from its beginning on.

        A file that is deleted during the read ends early: its announced length reveals the missing part.
        """
        key, start = file.object_key, 0
        if key is None:
            async for piece in self._read_sql(file):
                key = await self._object_key(file.id)
                if key is not None:  # it has moved meanwhile, and the piece may be from after a data deletion
                    break
                yield piece
                start += len(piece)
            else:  # the rest may have moved
                key = await self._object_key(file.id) if start < file.num_bytes else None
        while key is not None and start < file.num_bytes:
            try:
                piece = await self.objects.read_range(key, start, min(PIECE_BYTES, file.num_bytes - start))
            except ObjectMissing:
                break
            yield piece
            start += len(piece)
        if not start:
            raise _gone(file.id)

    async def locate(self, file_id: str) -> tuple[str, int]:
        """Return a file's object and its size in bytes; move the content there first if it is in SQL. Raises Gone."""
        async with self.database.read() as session:
            file = await session.get(StoredFile, file_id)
        if file is None:
            raise _gone(file_id)
        return file.object_key or await self._move(file), file.num_bytes

    async def read_range(self, key: str, start: int, num_bytes: int) -> bytes:
        """Return so many bytes of a file's object. Raises Gone."""
        try:
            return await self.objects.read_range(key, start, num_bytes)
        except ObjectMissing as exc:
            raise _gone(key) from exc

    async def move_some(self) -> int:
        """Move a content from SQL to the object store, or erase some of what has moved.

        Return the number of files or rows, 0 where nothing is left. After a kill at any point a repetition continues.
        """
        settled = StoredFile.state == FileState.READY, StoredFile.object_key.is_(None)
        async with self.database.read() as session:
            statement = select(StoredFile).where(*settled, StoredFile.id.not_in(self.incomplete)).limit(1)
            file = (await session.scalars(statement)).first()
        if file is None:
            async with self.database.write() as session:
                return await erase_moved_chunks(session) or await self._erase_moved_answers(session)
        try:
            await self._move(file)
        except Gone:
            log.exception(
                "file_content_incomplete", file_id=file.id, num_bytes=file.num_bytes, advice="upload the file again"
            )
            self.incomplete.add(file.id)
        return 1

    async def purge(self) -> int:
        """Erase a part of a file that is no longer visible; return the number of rows, 0 if there is none."""
        async with self.database.write() as session:
            file = await lock_erasable(session, self.users.is_needed(), self.now)
            if file is None:
                return 0
            if file.state != FileState.DELETED:
                if await self.users.user_of(session, file.id) is not None:  # since the query, before the lock
                    return 0
                file.state = FileState.DELETED  # so that nothing starts to need it
                await session.flush()
            if file.object_key is None:
                return await self._erase_some(session, file)
        await self.objects.delete(file.object_key)
        async with self.database.write() as session:
            return await self._erase_some(session, file)

    async def _move(self, file: StoredFile) -> str:
        """Write the object of a file whose content is in SQL; return its key. Raises Gone.

        Several processes may do so at once: they write the same bytes.
        """
        key = file_key(file.tenant_id, file.id)
        writer = self.objects.begin_object(key)
        try:
            async for piece in self._read_sql(file):
                await writer.write(piece)
            if writer.num_bytes != file.num_bytes:
                moved_to = await self._object_key(file.id)
                if moved_to is None:
                    raise _gone(file.id)
                return moved_to
            written = await writer.finish()
        finally:
            writer.abort()
        moved = {"object_key": key, "digest": written.digest}
        unmoved = StoredFile.id == file.id, StoredFile.state == FileState.READY, StoredFile.object_key.is_(None)
        async with self.database.write() as session:
            await session.execute(update(StoredFile).where(*unmoved).values(moved))
        if await self._object_key(file.id) is None:
            await self.objects.delete(key)
            raise _gone(file.id)
        return key

    async def _read_sql(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Yield a content that is in SQL, each piece in its own transaction."""
        if file.batch_id is not None:
            async for piece in self.users.read(file):
                yield piece
            return
        start = 0
        while start < file.num_bytes:
            async with self.database.read() as session:
                data = await read_chunk(session, file.id, start)
            if not data:
                return
            yield data
            start += len(data)

    async def _object_key(self, file_id: str) -> str | None:
        async with self.database.read() as session:
            return await session.scalar(select(StoredFile.object_key).where(StoredFile.id == file_id))

    async def _erase_moved_answers(self, session: AsyncSession) -> int:
        moved = StoredFile.batch_id > "", StoredFile.object_key.is_not(None), StoredFile.state == FileState.READY
        file = (await session.scalars(select(StoredFile).where(*moved).limit(1).with_for_update())).first()
        if file is None:
            return 0
        num_answers = await self.users.erase_some(session, file)
        if not num_answers:
            file.batch_id = file.line_state = None
        return num_answers or 1

    async def _erase_some(self, session: AsyncSession, file: StoredFile) -> int:
        """Erase what is left in SQL of a file whose object is deleted, finally its row; return the number of rows."""
        num_answers = 0 if file.batch_id is None else await self.users.erase_some(session, file)
        num_rows = num_answers or await erase_chunks(session, file.id)
        if not num_rows:
            await session.execute(delete(StoredFile).where(StoredFile.id == file.id))
        return num_rows or 1


def _gone(name: str) -> Gone:
    return Gone(f"the content of {name!r} is not stored any more; upload the file again", code="file_content_missing")

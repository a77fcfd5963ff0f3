"""Operations of tenants on their files, independent of the content's storage and of HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.keyset import ListRequest
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import Conflict
from moiety_platform.files.derived import FileUsers
from moiety_platform.files.models import FileState, StoredFile
from moiety_platform.files.store import Now, erase_some, get_file, list_files, lock_erasable, read_chunk


@dataclass(frozen=True, slots=True)
class Files:
    """Files of all tenants in one gateway process."""

    database: Database
    users: FileUsers
    now: Now = now_ms

    async def get(self, project_id: str, file_id: str) -> StoredFile:
        """Return the file. Raises NotFound."""
        async with self.database.read() as session:
            return await get_file(session, project_id, file_id, now=self.now)

    async def list(
        self, project_id: str, wanted: ListRequest, purpose: str | None
    ) -> tuple[Sequence[StoredFile], bool]:
        """Return some of the project's files, and whether more follow. Raises BadRequest."""
        async with self.database.read() as session:
            return await list_files(session, project_id, wanted, purpose, self.now)

    async def delete(self, project_id: str, file_id: str) -> None:
        """Hide the file; its content is erased soon. Raises NotFound, or Conflict while a batch needs it."""
        async with self.database.write() as session:
            file = await get_file(session, project_id, file_id, lock=True, now=self.now)
            user = await self.users.user_of(session, file.id)
            if user is not None:
                raise Conflict(
                    f"the batch {user} is reading this file; wait for its end or cancel it, then delete the file",
                    code="file_in_use",
                    param="file_id",
                )
            file.state = FileState.DELETED

    async def read(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Yield the content piece by piece, each in its own transaction. Raises Unavailable."""
        if file.batch_id is not None:
            async for piece in self.users.read(file):
                yield piece
            return
        start = 0
        while start < file.num_bytes:
            async with self.database.read() as session:
                data = await read_chunk(session, file.id, start)
            if not data:
                return  # deleted during the read: the announced length reveals the missing part
            yield data
            start += len(data)

    async def purge(self, session: AsyncSession) -> int:
        """Erase a part of a file that is no longer visible, within the caller's transaction.

        Return the number of rows, 0 where there is no file to erase.
        """
        file = await lock_erasable(session, self.users.is_needed(), self.now)
        if file is None:
            return 0
        if file.state != FileState.DELETED:
            if await self.users.user_of(session, file.id) is not None:  # since the query, before the lock
                return 0
            file.state = FileState.DELETED  # so that nothing starts to need it
            await session.flush()
        num_answers = 0 if file.batch_id is None else await self.users.erase_some(session, file)
        return num_answers or await erase_some(session, file.id)

"""What tenants do with their files, whichever way the content is kept. Knows nothing of HTTP."""

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
from moiety_platform.files.store import Now, erase_some, find_erasable, get_file, list_files, read_chunk

FILES_A_SWEEP = 100


@dataclass(frozen=True, slots=True)
class Files:
    """The files of all tenants, as one gateway process serves them."""

    database: Database
    users: FileUsers
    now: Now = now_ms

    async def get(self, project_id: str, file_id: str) -> StoredFile:
        """Raises NotFound."""
        async with self.database.read() as session:
            return await get_file(session, project_id, file_id, now=self.now)

    async def list(
        self, project_id: str, wanted: ListRequest, purpose: str | None
    ) -> tuple[Sequence[StoredFile], bool]:
        """Some of the project's files, and whether more follow. Raises BadRequest."""
        async with self.database.read() as session:
            return await list_files(session, project_id, wanted, purpose, self.now)

    async def delete(self, project_id: str, file_id: str) -> None:
        """Nobody sees it any more; its content is erased soon. Raises NotFound, or Conflict while a batch needs it."""
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
        """The content, piece by piece, each in a transaction of its own. Raises Unavailable."""
        if file.batch_id is not None:
            async for piece in self.users.read(file):
                yield piece
            return
        start = 0
        while start < file.num_bytes:
            async with self.database.read() as session:
                data = await read_chunk(session, file.id, start)
            if not data:
                return  # it was deleted while it was read: what is missing shows by the length that was announced
            yield data
            start += len(data)

    async def sweep(self) -> int:
        """Erase some of what nobody may see any more; how many files are gone. Raises Unavailable."""
        async with self.database.read() as session:
            found = await find_erasable(session, FILES_A_SWEEP, self.now)
        gone = 0
        for file in found:
            if await self._retire(file.id):
                while not await self._erase_some(file):
                    pass
                gone += 1
        return gone

    async def _retire(self, file_id: str) -> bool:
        """Make sure that nobody begins to need it; False while somebody does."""
        async with self.database.write() as session:
            file = await session.get(StoredFile, file_id, with_for_update=True)
            if file is None or await self.users.user_of(session, file_id) is not None:
                return False
            file.state = FileState.DELETED
        return True

    async def _erase_some(self, file: StoredFile) -> bool:
        async with self.database.write() as session:
            return await self._erase(session, file)

    async def _erase(self, session: AsyncSession, file: StoredFile) -> bool:
        if file.batch_id is not None and not await self.users.erase_some(session, file):
            return False
        return await erase_some(session, file.id)

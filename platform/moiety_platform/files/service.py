"""Operations of tenants on their files, independent of the content's storage and of HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from moiety_platform.db.keyset import ListRequest
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import Conflict
from moiety_platform.files.contents import FileContents
from moiety_platform.files.models import FileState, StoredFile
from moiety_platform.files.store import Now, get_file, list_files


@dataclass(frozen=True, slots=True)
class Files:
    """Files of all tenants in one gateway process."""

    database: Database
    contents: FileContents
    now: Now = now_ms

    async def get(self, project_id: str, file_id: str) -> StoredFile:
        """Return the file. Raises NotFound."""
        async with self.database.read() as session:
            return await get_file(session, project_id, file_id, now=self.now)

    async def list(
        self, project_id: str, list_request: ListRequest, purpose: str | None
    ) -> tuple[Sequence[StoredFile], bool]:
        """Return some of the project's files, and whether more follow. Raises BadRequest."""
        async with self.database.read() as session:
            return await list_files(session, project_id, list_request, purpose, self.now)

    async def delete(self, project_id: str, file_id: str) -> None:
        """Hide the file; its content is erased soon. Raises NotFound, or Conflict while a batch needs it."""
        async with self.database.write() as session:
            file = await get_file(session, project_id, file_id, lock=True, now=self.now)
            user = await self.contents.users.user_of(session, file.id)
            if user is not None:
                raise Conflict(
                    f"the batch {user} is reading this file; wait for its end or cancel it, then delete the file",
                    code="file_in_use",
                    param="file_id",
                )
            file.state = FileState.DELETED

    async def read(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Return the pieces of the content, the first of which is read at once.

        So a store that is away, or a missing content, is an error and no broken answer. Raises Unavailable or Gone.
        """
        pieces = self.contents.read(file)
        first = await anext(pieces, b"")

        async def whole() -> AsyncIterator[bytes]:
            yield first
            async for piece in pieces:
                yield piece

        return whole()

"""What files ask of those who use them and make them, so that this package need not know them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.files.models import StoredFile


class FileUsers(Protocol):
    """Batches, as files see them."""

    async def user_of(self, session: AsyncSession, file_id: str) -> str | None:
        """The id of something that still needs the file; the file is locked, so nothing begins to."""
        ...

    def is_needed(self) -> ColumnElement[bool]:
        """The same of each row of a query on files, as far as it is known before they are locked."""
        ...

    def read(self, file: StoredFile) -> AsyncIterator[bytes]:
        """The content of a file that is kept elsewhere. Raises Unavailable."""
        ...

    async def erase_some(self, session: AsyncSession, file: StoredFile) -> int:
        """Erase a part of such content; how many rows, 0 where there is nothing left of it."""
        ...

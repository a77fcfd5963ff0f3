"""Interface to the packages that use and create files, so that this package need not import them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.files.models import StoredFile


class FileUsers(Protocol):
    """Users of files, which are batches."""

    async def user_of(self, session: AsyncSession, file_id: str) -> str | None:
        """Return the id of an object that still needs the locked file.

        The lock keeps others from starting to need it.
        """
        ...

    def is_needed(self) -> ColumnElement[bool]:
        """Return the same condition for the rows of a query on files; preliminary until the rows are locked."""
        ...

    def read(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Yield the content of a file that is kept elsewhere. Raises Unavailable."""
        ...

    async def erase_some(self, session: AsyncSession, file: StoredFile) -> int:
        """Erase a part of that content; return the number of rows, 0 where nothing is left."""
        ...

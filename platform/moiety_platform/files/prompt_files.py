"""Images and documents that requests name by the id of an uploaded file, read within limits.

A client can name large files with a few bytes, so their sizes are checked before anything is read, and reads at the
same time are bounded for the process and each tenant.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from moiety_platform.auth.principal import Principal
from moiety_platform.document_extraction.extractor import DocumentRefused
from moiety_platform.document_extraction.frames import RefusalReason
from moiety_platform.errors import Gone, NotFound
from moiety_platform.files.models import StoredFile
from moiety_platform.files.service import Files
from moiety_platform.files.upload import IMAGE_PURPOSES
from moiety_platform.inference.document_preparation import UploadedFile
from moiety_platform.inference.link_fetcher import CannotFetch, NoSuchFile
from moiety_platform.inference.tenant_slots import TenantSlots
from moiety_wire.images import ImageAllowance, ImageRules

MAX_READS = 8  # at the same time in this process
MAX_READS_PER_TENANT = 2


class UploadedPromptFiles:
    """Reader of uploaded images and documents in one gateway process."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._slots = TenantSlots(MAX_READS)

    async def read_all(
        self, file_ids: Sequence[str], owner: Principal, limits: ImageRules | ImageAllowance
    ) -> dict[str, bytes | CannotFetch]:
        """Return the content of each file of the owner's project, or why it cannot be used. Raises Unavailable."""
        found: dict[str, bytes | CannotFetch] = {}
        left = limits.max_total_bytes
        for file_id in file_ids:
            try:
                file = await self._files.get(owner.project_id, file_id)
                _check_usable(file, limits.max_bytes, left)
                left -= file.num_bytes
                await self._slots.acquire(owner.tenant_id, MAX_READS_PER_TENANT)
                try:
                    found[file_id] = await self._read(file)
                finally:
                    self._slots.release(owner.tenant_id)
            except NotFound as exc:
                found[file_id] = NoSuchFile(exc.message)
            except Gone as exc:
                found[file_id] = CannotFetch(exc.message)
            except CannotFetch as exc:
                found[file_id] = exc
        return found

    async def read_document_head(self, file_id: str, owner: Principal) -> UploadedFile:
        """Return the size of a file of the owner's project, and its first bytes.

        Raises DocumentRefused for a file of another purpose; NotFound, Gone, Unavailable.
        """
        file = await self._documents_file(file_id, owner)
        pieces = self._files.contents.read(file)
        async with aclosing(pieces):
            async for piece in pieces:
                return UploadedFile(file.num_bytes, piece)
        raise _deleted(file)

    async def read_document(self, file_id: str, owner: Principal) -> bytes:
        """Return a file of the owner's project. Raises the errors of `read_document_head`."""
        file = await self._documents_file(file_id, owner)
        await self._slots.acquire(owner.tenant_id, MAX_READS_PER_TENANT)
        try:
            return await self._read(file)
        except CannotFetch as exc:
            raise _deleted(file) from exc
        finally:
            self._slots.release(owner.tenant_id)

    async def _documents_file(self, file_id: str, owner: Principal) -> StoredFile:
        file = await self._files.get(owner.project_id, file_id)
        if file.purpose not in IMAGE_PURPOSES:
            why = f"has the purpose {file.purpose!r}; upload it as 'user_data'"
            raise DocumentRefused(why, RefusalReason.WRONG_PURPOSE)
        return file

    async def _read(self, file: StoredFile) -> bytes:
        content = b"".join([piece async for piece in self._files.contents.read(file)])
        if len(content) != file.num_bytes:
            raise CannotFetch("its file was deleted while it was read; upload it again")
        return content


def _deleted(file: StoredFile) -> Gone:
    return Gone(f"the document {file.id!r} was deleted while it was read; upload it again")


def _check_usable(file: StoredFile, max_bytes: int, max_bytes_left: int) -> None:
    if file.purpose not in IMAGE_PURPOSES:
        purposes = " or ".join(map(repr, IMAGE_PURPOSES))
        raise CannotFetch(f"its file has the purpose {file.purpose!r}; upload it with {purposes}")
    if file.num_bytes > max_bytes:
        raise CannotFetch(f"it has {file.num_bytes:,} bytes; it may have {max_bytes:,}. Make it smaller")
    if file.num_bytes > max_bytes_left:
        raise CannotFetch("the images of the request have too many bytes together; send fewer or smaller")

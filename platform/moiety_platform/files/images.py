"""Images and text documents that requests name by the id of an uploaded file, read within limits.

A client can name large files with a few bytes, so their sizes are checked before anything is read, and reads at the
same time are bounded for the process and each tenant.
"""

from __future__ import annotations

from collections.abc import Sequence

from moiety_platform.auth.principal import Principal
from moiety_platform.errors import BadRequest, Gone, NotFound
from moiety_platform.files.models import StoredFile
from moiety_platform.files.service import Files
from moiety_platform.files.upload import IMAGE_PURPOSES
from moiety_platform.inference.image_fetcher import CannotFetch, NoSuchFile
from moiety_platform.inference.tenant_slots import TenantSlots
from moiety_wire.images import ImageAllowance, ImageRules

MAX_READS = 8  # at the same time in this process
MAX_READS_PER_TENANT = 2
MAX_DOCUMENT_BYTES = 4 << 20  # of the documents of one request together


class UploadedImages:
    """Reader of uploaded images in one gateway process."""

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

    async def read_documents(self, file_ids: Sequence[str], owner: Principal) -> dict[str, str]:
        """Return the text of each file of the owner's project.

        Raises BadRequest for a file that is not a document of plain text, or too large; NotFound, Gone, Unavailable.
        """
        found: dict[str, str] = {}
        left = MAX_DOCUMENT_BYTES
        for file_id in file_ids:
            file = await self._files.get(owner.project_id, file_id)
            if file.purpose not in IMAGE_PURPOSES:
                raise _unread(file, f"has the purpose {file.purpose!r}; upload it as 'user_data'")
            left -= file.num_bytes
            if left < 0:
                raise _unread(file, f"is too large: the documents of a request may have {MAX_DOCUMENT_BYTES:,} bytes")
            await self._slots.acquire(owner.tenant_id, MAX_READS_PER_TENANT)
            try:
                content = await self._read(file)
                found[file_id] = content.decode("utf-8-sig")
            except CannotFetch as exc:
                raise _unread(file, f"cannot be read: {exc}") from exc
            except UnicodeDecodeError as exc:
                raise _unread(file, "is not plain text in UTF-8; extract its text, and upload that") from exc
            finally:
                self._slots.release(owner.tenant_id)
            if "\0" in found[file_id] or content.startswith(b"%PDF"):
                raise _unread(file, "is not plain text; extract its text, and upload that")
        return found

    async def _read(self, file: StoredFile) -> bytes:
        content = b"".join([piece async for piece in self._files.contents.read(file)])
        if len(content) != file.num_bytes:
            raise CannotFetch("its file was deleted while it was read; upload it again")
        return content


def _unread(file: StoredFile, why: str) -> BadRequest:
    return BadRequest(f"the document {file.id!r} {why}", code="invalid_document", param="file_id")


def _check_usable(file: StoredFile, max_bytes: int, max_bytes_left: int) -> None:
    if file.purpose not in IMAGE_PURPOSES:
        purposes = " or ".join(map(repr, IMAGE_PURPOSES))
        raise CannotFetch(f"its file has the purpose {file.purpose!r}; upload it with {purposes}")
    if file.num_bytes > max_bytes:
        raise CannotFetch(f"it has {file.num_bytes:,} bytes; it may have {max_bytes:,}. Make it smaller")
    if file.num_bytes > max_bytes_left:
        raise CannotFetch("the images of the request have too many bytes together; send fewer or smaller")

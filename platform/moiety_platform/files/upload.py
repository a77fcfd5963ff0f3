"""One upload: from a form to a published file. An aborted upload leaves nothing visible.

Bytes are counted before they are stored, so that uploads at the same time do not exceed the tenant's storage. The row
comes before the object: what a kill leaves is found by its row and erased.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from litestar.types import Receive, Scope
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.principal import Principal
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, TooLarge, Unavailable
from moiety_platform.files.file_limits import FileLimits
from moiety_platform.files.form import Field, FileBegins, read_form
from moiety_platform.files.models import StoredFile
from moiety_platform.files.store import Now, begin_file, discard_upload, grow_file, publish_file
from moiety_platform.object_storage.store import PIECE_BYTES, ObjectStore, ObjectWriter

BATCH_PURPOSE = "batch"
IMAGE_PURPOSES = ("vision", "user_data")
PURPOSES = (BATCH_PURPOSE, *IMAGE_PURPOSES)
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 30 * 86_400
_NAMED = "'batch' for requests, or 'vision' or 'user_data' for images"


Created = TypeVar("Created")


@dataclass(slots=True)
class Uploads:
    """Uploads of one gateway process. The limits can be changed, for files that begin afterwards."""

    database: Database
    objects: ObjectStore
    limits: FileLimits
    now: Now = now_ms

    async def receive(
        self, owner: Principal, scope: Scope, receive: Receive, default_purpose: str | None = None
    ) -> StoredFile:
        """Store the file of a request, with `default_purpose` if the form names none.

        Raises BadRequest, TooLarge, Conflict, InsufficientStorage, Unavailable or ClientDisconnected.
        """
        upload = _Upload(self, owner)
        if default_purpose is not None:
            await upload.take(Field("purpose", default_purpose))
        try:
            async for part in read_form(receive, scope["headers"], self.limits.max_file_bytes):
                await upload.take(part)
            return await upload.finish(_return_file)
        except BaseException:  # including a disconnect or a shutdown: the received part is discarded
            await upload.discard()
            raise

    async def store_content(
        self,
        owner: Principal,
        filename: str,
        content: bytes,
        create_user: Callable[[AsyncSession, StoredFile], Awaitable[Created]],
    ) -> Created:
        """Store a file of requests that the server has made, and return what `create_user` creates for it.

        Both are published in one transaction, or neither is. Raises InsufficientStorage, TooLarge, Unavailable, and
        what `create_user` raises.
        """
        if len(content) > self.limits.max_file_bytes:
            raise TooLarge(f"the requests have {len(content):,} bytes; a batch may have {self.limits.max_file_bytes:,}")
        upload = _Upload(self, owner)
        try:
            for part in (Field("purpose", BATCH_PURPOSE), FileBegins(filename), content):
                await upload.take(part)
            return await upload.finish(create_user)
        except BaseException:
            await upload.discard()
            raise


class _Upload:
    """State of one upload."""

    def __init__(self, uploads: Uploads, owner: Principal) -> None:
        self._uploads = uploads
        self._owner = owner
        self._fields: dict[str, str] = {}
        self._file_id: str | None = None
        self._object: ObjectWriter | None = None
        self._pending = bytearray()
        self._counted = 0

    async def take(self, part: Field | FileBegins | bytes) -> None:
        if isinstance(part, Field):
            self._fields[part.name] = part.value
        elif isinstance(part, FileBegins):
            async with self._uploads.database.write() as session:
                file = await begin_file(session, self._owner, part.filename, self._uploads.now)
            assert file.object_key is not None, "an upload goes to the object store"
            self._file_id, self._object = file.id, self._uploads.objects.begin_object(file.object_key)
        else:
            self._pending += part
            while len(self._pending) >= PIECE_BYTES:
                await self._store(bytes(self._pending[:PIECE_BYTES]))
                del self._pending[:PIECE_BYTES]

    async def finish(self, create_user: Callable[[AsyncSession, StoredFile], Awaitable[Created]]) -> Created:
        if self._file_id is None or self._object is None:
            raise BadRequest("'file' is missing from the form; send the file's content in it", param="file")
        purpose, expires_s = _purpose(self._fields), _expires_s(self._fields) or self._uploads.limits.keep_s
        if self._pending:
            await self._store(bytes(self._pending))
        if not self._counted:
            raise BadRequest("the file is empty; send its content", param="file", code="empty_file")
        written = await self._object.finish()
        async with self._uploads.database.write() as session:
            file = await publish_file(session, self._file_id, purpose, written.digest, expires_s)
            return await create_user(session, file)

    async def discard(self) -> None:
        """Discard the upload. If a store is down, the retention job finds the rest."""
        if self._file_id is None or self._object is None:
            return
        may_be_complete = self._object.abort()
        with contextlib.suppress(Unavailable):
            async with self._uploads.database.write() as session:
                is_discarded = await discard_upload(session, self._file_id)
            if may_be_complete and is_discarded:  # the row may be gone since long
                await self._uploads.objects.delete(self._object.key)

    async def _store(self, data: bytes) -> None:
        assert self._file_id is not None, "content follows the beginning of the file"
        assert self._object is not None, "content follows the beginning of the file"
        uploads = self._uploads
        total = self._counted + len(data)
        async with uploads.database.write() as session:
            await grow_file(
                session, self._file_id, total, max_tenant_bytes=uploads.limits.max_tenant_bytes, now=uploads.now
            )
        self._counted = total
        await self._object.write(data)


async def _return_file(session: AsyncSession, file: StoredFile) -> StoredFile:
    return file


def check_expiry(anchor: object, seconds: object, param: str) -> int:
    """Return the seconds of an `expires_after`. Raises BadRequest."""
    if anchor != "created_at":
        raise BadRequest(f"'{param}.anchor' must be 'created_at'", param=param)
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise BadRequest(f"'{param}.seconds' must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}", param=param)
    return seconds


def _purpose(fields: dict[str, str]) -> str:
    purpose = fields.get("purpose")
    if purpose is None:
        raise BadRequest(f"'purpose' is missing from the form; it must be {_NAMED}", param="purpose")
    if purpose not in PURPOSES:
        raise BadRequest(f"'purpose' must be {_NAMED}, not {purpose[:64]!r}", param="purpose")
    return purpose


def _expires_s(fields: dict[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if (in_seconds := fields.get("expires_in_seconds")) is not None:  # Anthropic's field
        if in_seconds.isascii() and in_seconds.isdigit() and MIN_EXPIRY_S <= int(in_seconds[:10]) <= MAX_EXPIRY_S:
            return int(in_seconds)
        raise BadRequest(
            f"'expires_in_seconds' must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}", param="expires_in_seconds"
        )
    if anchor is None and seconds is None:
        return None
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    return check_expiry(anchor, int(seconds or 0) if is_number else None, "expires_after")

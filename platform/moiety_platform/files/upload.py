"""One upload: from a form to a published file, one chunk per transaction. An aborted upload leaves nothing visible."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from litestar.types import Receive, Scope

from moiety_platform.auth.principal import Principal
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, Unavailable
from moiety_platform.files.form import Field, FileBegins, read_form
from moiety_platform.files.models import StoredFile
from moiety_platform.files.store import CHUNK_BYTES, Now, append_chunk, begin_file, discard_upload, publish_file

BATCH_PURPOSE = "batch"
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 30 * 86_400


@dataclass(slots=True)
class Uploads:
    """Uploads of one gateway process. The bounds can be changed, for the files that begin afterwards."""

    database: Database
    max_file_bytes: int
    max_tenant_bytes: int
    keep_s: int | None = None  # lifetime of a file without a requested expiry; None: until it is deleted
    now: Now = now_ms

    async def receive(self, owner: Principal, scope: Scope, receive: Receive) -> StoredFile:
        """Store the file of a request. Raises BadRequest, TooLarge, Conflict, Unavailable or ClientDisconnected."""
        upload = _Upload(self, owner)
        try:
            async for part in read_form(receive, scope["headers"], self.max_file_bytes):
                await upload.take(part)
            return await upload.finish()
        except BaseException:  # including a disconnect or a shutdown: the received part is discarded
            await upload.discard()
            raise


class _Upload:
    """State of one upload."""

    def __init__(self, uploads: Uploads, owner: Principal) -> None:
        self._uploads = uploads
        self._owner = owner
        self._fields: dict[str, str] = {}
        self._file_id: str | None = None
        self._pending = bytearray()
        self._stored = 0

    async def take(self, part: Field | FileBegins | bytes) -> None:
        if isinstance(part, Field):
            self._fields[part.name] = part.value
        elif isinstance(part, FileBegins):
            async with self._uploads.database.write() as session:
                file = await begin_file(session, self._owner, part.filename, self._uploads.now)
            self._file_id = file.id
        else:
            self._pending += part
            while len(self._pending) >= CHUNK_BYTES:
                await self._store(bytes(self._pending[:CHUNK_BYTES]))
                del self._pending[:CHUNK_BYTES]

    async def finish(self) -> StoredFile:
        if self._file_id is None:
            raise BadRequest("'file' is missing from the form; send the file's content in it", param="file")
        purpose, expires_s = _purpose(self._fields), _expires_s(self._fields) or self._uploads.keep_s
        if self._pending:
            await self._store(bytes(self._pending))
        if not self._stored:
            raise BadRequest("the file is empty; send at least one line", param="file", code="empty_file")
        async with self._uploads.database.write() as session:
            return await publish_file(session, self._file_id, purpose, expires_s)

    async def discard(self) -> None:
        """Discard the upload. If the store is down, the sweep finds the rest."""
        if self._file_id is None:
            return
        with contextlib.suppress(Unavailable):
            async with self._uploads.database.write() as session:
                await discard_upload(session, self._file_id)

    async def _store(self, data: bytes) -> None:
        assert self._file_id is not None, "content follows the beginning of the file"
        uploads = self._uploads
        async with uploads.database.write() as session:
            await append_chunk(
                session,
                self._file_id,
                self._stored,
                data,
                max_tenant_bytes=uploads.max_tenant_bytes,
                now=uploads.now,
            )
        self._stored += len(data)


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
        raise BadRequest("'purpose' is missing from the form; it must be 'batch'", param="purpose")
    if purpose != BATCH_PURPOSE:
        raise BadRequest(f"'purpose' must be 'batch', not {purpose[:64]!r}", param="purpose")
    return purpose


def _expires_s(fields: dict[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    return check_expiry(anchor, int(seconds or 0) if is_number else None, "expires_after")

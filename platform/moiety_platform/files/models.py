"""Tables of files. Times are Unix milliseconds of the database's clock, sizes are bytes."""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import BigInteger, CheckConstraint, ColumnElement, Index, LargeBinary, String, select
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base
from moiety_platform.tenants.models import ID_LENGTH

MAX_FILENAME_LENGTH = 255
MAX_KEY_LENGTH = 128


class FileState(StrEnum):
    UPLOADING = "uploading"  # not visible yet; swept when nothing is added any more
    READY = "ready"
    DELETED = "deleted"  # not visible any more; its content is being erased


class StoredFile(Base):
    """One file.

    Its content is an object. While there is no `object_key` yet, it is in SQL: the answers of the lines of the batch
    `batch_id` in the state `line_state` or, of version 0.1.0, chunks. Both move to the object store.
    """

    __tablename__ = "files"
    __table_args__ = (
        CheckConstraint("state IN ('uploading', 'ready', 'deleted')", name="state_known"),
        Index(None, "project_id", "created_ms", "id"),
        Index(None, "tenant_id"),
        Index(None, "state", "touched_ms"),
        Index(None, "expires_ms"),
        Index(None, "object_key"),
        Index(None, "batch_id"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    project_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(MAX_FILENAME_LENGTH))
    state: Mapped[str] = mapped_column(String(16))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_ms: Mapped[int] = mapped_column(BigInteger)
    touched_ms: Mapped[int] = mapped_column(BigInteger)  # time of the last addition
    expires_ms: Mapped[int | None] = mapped_column(BigInteger)
    batch_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    line_state: Mapped[str | None] = mapped_column(String(16))
    object_key: Mapped[str | None] = mapped_column(String(MAX_KEY_LENGTH))
    digest: Mapped[str | None] = mapped_column(String(64))  # SHA-256 of the object


class FileChunk(Base):
    """Bytes of a file from `start` up to `stop`, of version 0.1.0. No row is left once all have moved."""

    __tablename__ = "file_chunks"

    file_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    stop: Mapped[int] = mapped_column(BigInteger)
    data: Mapped[bytes] = mapped_column(LargeBinary)

    @classmethod
    def of_tenant(cls, tenant_id: str) -> ColumnElement[bool]:
        """Return the condition for the rows of this tenant."""
        return cls.file_id.in_(select(StoredFile.id).where(StoredFile.tenant_id == tenant_id))

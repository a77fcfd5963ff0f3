"""Tables of batches. Times are Unix milliseconds by the database's clock.

`available_ms` serves as lease and as pause: until then no other worker takes the row, whether it is being worked on or
waiting.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, BigInteger, CheckConstraint, ColumnElement, Index, LargeBinary, String, select
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base
from moiety_platform.tenants.models import ID_LENGTH
from moiety_platform.usage.attribution import MAX_END_USER_CHARS

WORKER_ID_LENGTH = 64
MAX_CUSTOM_ID_LENGTH = 256
MAX_ENDPOINT_LENGTH = 64


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


OPEN = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)


class LineState(StrEnum):
    PENDING = "pending"  # to be answered, or being answered
    COMPLETED = "completed"  # answered and billed: in the output file
    FAILED = "failed"  # without an answer, and not billed: in the error file


class Batch(Base):
    """One batch.

    `closing_as` is the status after finalizing, and `closing_error` the error of its unanswered lines; `available_ms`
    is the lease of the worker that validates or finalizes it.
    """

    __tablename__ = "batches"
    __table_args__ = (
        CheckConstraint("completed + failed <= total", name="counts_add_up"),
        Index(None, "project_id", "created_ms", "id"),
        Index(None, "tenant_id", "status"),
        Index(None, "status", "created_ms"),
        Index(None, "input_file_id"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    project_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    key_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    end_user: Mapped[str | None] = mapped_column(String(MAX_END_USER_CHARS))  # that the creator's token has verified
    endpoint: Mapped[str] = mapped_column(String(MAX_ENDPOINT_LENGTH))
    input_file_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    note: Mapped[dict[str, str] | None] = mapped_column(JSON(none_as_null=True))  # the client's `metadata`
    output_expires_s: Mapped[int | None]
    status: Mapped[str] = mapped_column(String(16))
    closing_as: Mapped[str | None] = mapped_column(String(16))
    closing_error: Mapped[dict[str, str] | None] = mapped_column(JSON(none_as_null=True))
    errors: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    output_file_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    error_file_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    total: Mapped[int]
    completed: Mapped[int]
    failed: Mapped[int]
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    available_ms: Mapped[int] = mapped_column(BigInteger)
    created_ms: Mapped[int] = mapped_column(BigInteger)
    expires_ms: Mapped[int] = mapped_column(BigInteger)
    in_progress_ms: Mapped[int | None] = mapped_column(BigInteger)
    finalizing_ms: Mapped[int | None] = mapped_column(BigInteger)
    completed_ms: Mapped[int | None] = mapped_column(BigInteger)
    failed_ms: Mapped[int | None] = mapped_column(BigInteger)
    expired_ms: Mapped[int | None] = mapped_column(BigInteger)
    cancelling_ms: Mapped[int | None] = mapped_column(BigInteger)
    cancelled_ms: Mapped[int | None] = mapped_column(BigInteger)


class BatchLine(Base):
    """One line of a batch's input file: its place there (`start`, `num_bytes`) and its result.

    `answer` is its line of the output or error file. `owner` is the worker that processes it, or has ended it.
    """

    __tablename__ = "batch_lines"
    __table_args__ = (
        CheckConstraint("state IN ('pending', 'completed', 'failed')", name="state_known"),
        Index(None, "batch_id", "state", "number"),
    )

    batch_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)  # from 1
    custom_id: Mapped[str] = mapped_column(String(MAX_CUSTOM_ID_LENGTH))
    start: Mapped[int] = mapped_column(BigInteger)
    num_bytes: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    available_ms: Mapped[int] = mapped_column(BigInteger)
    owner: Mapped[str | None] = mapped_column(String(WORKER_ID_LENGTH))
    num_refusals: Mapped[int]  # retried as long as the batch lasts
    num_failures: Mapped[int]  # retried a few times
    answer: Mapped[bytes | None] = mapped_column(LargeBinary)
    answer_bytes: Mapped[int]

    @classmethod
    def of_tenant(cls, tenant_id: str) -> ColumnElement[bool]:
        """Return a condition for the rows of the tenant."""
        return cls.batch_id.in_(select(Batch.id).where(Batch.tenant_id == tenant_id))

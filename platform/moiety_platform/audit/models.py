"""The table of the audit log. Rows are only ever added."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, UtcDateTime

ACTOR_LENGTH = 64


class AuditEntry(Base):
    """One change. `before` is null of what was made, `after` of what was deleted; hashes of keys are in neither."""

    __tablename__ = "audit_log"
    __table_args__ = (Index(None, "object_id"),)

    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    actor: Mapped[str] = mapped_column(String(ACTOR_LENGTH))
    action: Mapped[str] = mapped_column(String(16))
    object_kind: Mapped[str] = mapped_column(String(32))
    object_id: Mapped[str] = mapped_column(String(300))
    before: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    after: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    hash: Mapped[str] = mapped_column(String(64))

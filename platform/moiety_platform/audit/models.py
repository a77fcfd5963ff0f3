"""Table of the audit log. Rows are only added; the content of a row can be erased once."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Index, SmallInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, UtcDateTime

ACTOR_LENGTH = 64
ROLE_LENGTH = 16
TENANT_LENGTH = 32
SALT_LENGTH = 32


class AuditEntry(Base):
    """One change.

    `before` is null for a created object, `after` for a deleted one; neither contains hashes of keys. `actor_role` is
    null where the platform itself is the actor, and in entries from before there were roles. `tenant_id` is the tenant
    of the changed object, null if it has none; it follows from the other fields, so no hash covers it. `version` is the
    version of the hash (see `chain.py`); `salt` and `digest` are null in version 1, and the salt is erased with the
    content.
    """

    __tablename__ = "audit_log"
    __table_args__ = (Index(None, "object_id"), Index(None, "tenant_id", "seq"))

    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[datetime] = mapped_column(UtcDateTime)
    actor: Mapped[str] = mapped_column(String(ACTOR_LENGTH))
    actor_role: Mapped[str | None] = mapped_column(String(ROLE_LENGTH))
    action: Mapped[str] = mapped_column(String(16))
    object_kind: Mapped[str] = mapped_column(String(32))
    object_id: Mapped[str] = mapped_column(String(300))
    before: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    after: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    tenant_id: Mapped[str | None] = mapped_column(String(TENANT_LENGTH))
    hash: Mapped[str] = mapped_column(String(64))
    version: Mapped[int] = mapped_column(SmallInteger, server_default="1")
    salt: Mapped[str | None] = mapped_column(String(SALT_LENGTH))
    digest: Mapped[str | None] = mapped_column(String(64))
    erased_at: Mapped[datetime | None] = mapped_column(UtcDateTime)

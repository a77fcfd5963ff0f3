"""Tables of tenancy: tenant → project → key. A key without a project is an administrator's, and has a role."""

from __future__ import annotations

import unicodedata
from datetime import datetime
from enum import StrEnum

from sqlalchemy import JSON, CheckConstraint, Double, ForeignKey, Index, LargeBinary, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column, validates

from moiety_platform.classes.models import MAX_CLASS_NAME_LENGTH
from moiety_platform.db.base import Base, UtcDateTime

MAX_NAME_LENGTH = 100
MAX_FOLDED_NAME_LENGTH = 400  # case folding expands a character to up to three; an id can follow
ID_LENGTH = 32
ROLE_LENGTH = 16
MARK_LENGTH = 16


def fold_name(name: str) -> str:
    """Return the form that all equal names share: NFC, case folded, NFC."""
    folded = unicodedata.normalize("NFC", name).casefold()
    return unicodedata.normalize("NFC", folded)


class TenantStatus(StrEnum):
    ACTIVE = "active"
    SUSPENDED = "suspended"


class SpeculativePrefillMode(StrEnum):
    """Modes of speculative (next-turn) prefill for a tenant's conversations on idle engines: off, free, or charged."""

    OFF = "off"
    FREE = "free"
    CHARGED = "charged"


class Tenant(Base):
    """One customer.

    `weight` is its fair share against the other tenants of its class; `service_class` is the best class that it may
    use.
    """

    __tablename__ = "tenants"
    __table_args__ = (
        CheckConstraint("weight > 0", name="weight_positive"),
        CheckConstraint("status IN ('active', 'suspended')", name="status_known"),
        Index(None, "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH), unique=True)
    service_class: Mapped[str] = mapped_column(String(MAX_CLASS_NAME_LENGTH), ForeignKey("service_classes.name"))
    weight: Mapped[float] = mapped_column(Double)
    status: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    speculative_prefill: Mapped[str] = mapped_column(String(16), server_default=SpeculativePrefillMode.OFF.value)
    folded_name: Mapped[str | None] = mapped_column(String(MAX_FOLDED_NAME_LENGTH), unique=True, index=True)

    @validates("name")
    def _fold_name(self, _field: str, name: str) -> str:
        self.folded_name = fold_name(name)
        return name


class TenantDeletion(Base):
    """Deletion of a tenant's data, running or complete: no data is added to the tenant. `counts` are rows by table."""

    __tablename__ = "tenant_deletions"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    begun_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    counts: Mapped[dict[str, int]] = mapped_column(JSON)


class Project(Base):
    """A tenant's project, which owns keys."""

    __tablename__ = "projects"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        Index(None, "created_at", "id"),
        Index(None, "tenant_id", "folded_name", unique=True),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    folded_name: Mapped[str | None] = mapped_column(String(MAX_FOLDED_NAME_LENGTH))

    @validates("name")
    def _fold_name(self, _field: str, name: str) -> str:
        self.folded_name = fold_name(name)
        return name


class ApiKey(Base):
    """A key, stored as the keyed hash of its text; `hint` contains the last four characters.

    `replaced_by` of a rotated key is its successor, and `root_id` of the successor is the first key of the chain, whose
    quotas apply to all of them. `role` and `tenant_id` are an administrator's; a project's key has its tenant through
    the project. `user_id` is that of the user who made it for itself. `pepper_mark` identifies the pepper of the hash;
    None: the hash predates marks.
    """

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("role IN ('owner', 'operator', 'tenant-admin', 'viewer')", name="role_known"),
        CheckConstraint("(project_id IS NULL) = (role IS NOT NULL)", name="project_or_role"),
        CheckConstraint(
            "CASE role WHEN 'tenant-admin' THEN tenant_id IS NOT NULL WHEN 'viewer' THEN 1 = 1 "
            "ELSE tenant_id IS NULL END",
            name="tenant_by_role",
        ),
        Index(None, "project_id"),
        Index(None, "tenant_id"),
        Index(None, "user_id"),
        Index(None, "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    project_id: Mapped[str | None] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    secret_hash: Mapped[bytes] = mapped_column(LargeBinary)
    hint: Mapped[str] = mapped_column(String(8))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    allowed_models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    replaced_by: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    role: Mapped[str | None] = mapped_column(String(ROLE_LENGTH))
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    root_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    pepper_mark: Mapped[str | None] = mapped_column(String(MARK_LENGTH))
    user_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))

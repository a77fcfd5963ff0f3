"""The tables of tenancy: tenant → project → key. A key without a project is an administrator's, and has a role."""

from __future__ import annotations

import unicodedata
from datetime import datetime
from enum import StrEnum

from sqlalchemy import JSON, CheckConstraint, Double, ForeignKey, Index, LargeBinary, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column, validates

from moiety_platform.classes.models import MAX_CLASS_NAME_LENGTH
from moiety_platform.db.base import Base, UtcDateTime

MAX_NAME_LENGTH = 100
MAX_FOLDED_NAME_LENGTH = 400  # case folding makes up to three characters of one; an id may follow
ID_LENGTH = 32
ROLE_LENGTH = 16
MARK_LENGTH = 16


def fold_name(name: str) -> str:
    """Return the form of a name that all names which count as the same have: NFC, case folded, NFC."""
    folded = unicodedata.normalize("NFC", name).casefold()
    return unicodedata.normalize("NFC", folded)


class TenantStatus(StrEnum):
    ACTIVE = "active"
    SUSPENDED = "suspended"


class SpeculativePrefillMode(StrEnum):
    """Whether engines may compute what a tenant's conversations are likely to go on with, while nothing else is to be
    done, and whether it pays for that."""

    OFF = "off"
    FREE = "free"
    CHARGED = "charged"


class Tenant(Base):
    """One customer. `weight` is its share against the other tenants of its class; `service_class` the best it may
    use."""

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
    """A tenant's data is being erased, or has been: nothing is added to such a tenant. `counts` are rows, by table."""

    __tablename__ = "erasures"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    begun_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    counts: Mapped[dict[str, int]] = mapped_column(JSON)


class Project(Base):
    """A tenant's unit of work, which its keys belong to."""

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
    """A key, by the keyed hash of its text; `hint` is the last four characters. A rotated key names its successor, and
    that the first of them all, whose limits are those of each. `role` and `tenant_id` are an administrator's; a
    project's key has its tenant through the project. `pepper_mark` tells by which pepper the hash was made; None: that
    was before there were marks."""

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

"""Table of users. A person with roles in several tenants has one row in each."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import JSON, CheckConstraint, ForeignKey, Index, LargeBinary, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, UtcDateTime
from moiety_platform.tenants.models import ID_LENGTH, MAX_NAME_LENGTH, ROLE_LENGTH

MAX_EMAIL_LENGTH = 254
MAX_ISSUER_LENGTH = 500
MAX_SUBJECT_LENGTH = 255
OF_DEPLOYMENT = "tenant_id IS NULL"


class UserState(StrEnum):
    """State of a user: `INVITED` until the invitation is accepted, then `ACTIVE`; `DISABLED` refuses the user."""

    INVITED = "invited"
    ACTIVE = "active"
    DISABLED = "disabled"


def unique_in_deployment(name: str, *columns: str) -> Index:
    """Return an index by which users of the deployment, which are of no tenant, differ in these columns."""
    of_deployment = text(OF_DEPLOYMENT)
    return Index(name, *columns, unique=True, sqlite_where=of_deployment, postgresql_where=of_deployment)


class User(Base):
    """A person with a role in one tenant, or in the whole deployment (`tenant_id` None).

    `project_ids` are the projects that a developer reaches, None for all of the tenant. `issuer` and `subject` identify
    the person at the identity provider since the invitation was accepted. `invitation_hash` is that of the open
    invitation. A user who came into being at the first sign-in has accepted none (`accepted_at` None): a token gave it
    the role at `role_seen_at`, and one without the role ended it at `role_ended_at`.
    """

    __tablename__ = "users"
    __table_args__ = (
        CheckConstraint("state IN ('invited', 'active', 'disabled')", name="state_known"),
        CheckConstraint("role IN ('owner', 'operator', 'tenant-admin', 'viewer', 'developer')", name="role_known"),
        UniqueConstraint("tenant_id", "email"),
        unique_in_deployment("ix_users_deployment_email", "email"),
        Index(None, "issuer", "subject"),
        Index(None, "tenant_id", "issuer", "subject", unique=True),
        unique_in_deployment("ix_users_deployment_subject", "issuer", "subject"),
        Index(None, "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    email: Mapped[str] = mapped_column(String(MAX_EMAIL_LENGTH))
    name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH))
    role: Mapped[str] = mapped_column(String(ROLE_LENGTH))
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    project_ids: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    state: Mapped[str] = mapped_column(String(16))
    issuer: Mapped[str | None] = mapped_column(String(MAX_ISSUER_LENGTH))
    subject: Mapped[str | None] = mapped_column(String(MAX_SUBJECT_LENGTH))
    invitation_hash: Mapped[bytes | None] = mapped_column(LargeBinary)
    invitation_expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    accepted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    role_seen_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    role_ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)

    @property
    def has_role_of_token(self) -> bool:
        """True if the role is that of the user's tokens, and ends with it; otherwise an administrator has given it."""
        return self.subject is not None and self.accepted_at is None

    def reaches(self, project_id: str) -> bool:
        """Return whether the user may use a project of its tenant."""
        return self.project_ids is None or project_id in self.project_ids

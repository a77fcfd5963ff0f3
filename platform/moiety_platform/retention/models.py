"""The table of chores: who is at which, and when each is due again."""

from __future__ import annotations

from sqlalchemy import BigInteger, ColumnElement, String, false
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base

MAX_CHORE_LENGTH = 32
OWNER_LENGTH = 64


class RetentionJobRecord(Base):
    """One chore. `available_ms` is a lease and a pause in one, by the database's clock in Unix milliseconds: until then
    nobody but its owner takes the row, whether somebody is at it or it is done for now."""

    __tablename__ = "retention_jobs"

    name: Mapped[str] = mapped_column(String(MAX_CHORE_LENGTH), primary_key=True)
    owner: Mapped[str | None] = mapped_column(String(OWNER_LENGTH))
    available_ms: Mapped[int] = mapped_column(BigInteger)

    @classmethod
    def of_tenant(cls, _tenant_id: str) -> ColumnElement[bool]:
        """The deployment's own, no tenant's."""
        return false()

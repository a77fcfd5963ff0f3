"""Tables of the contents of requests."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, Integer, LargeBinary, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, UtcDateTime

OPT_IN_LENGTH = 32


class ContentLogging(Base):
    """A tenant that opted in to the logging of contents, and how long they are kept.

    Each opt-in has an id of its own, so that a tenant that opts out and in again does not get back what was stored
    before.
    """

    __tablename__ = "content_logging"
    __table_args__ = (CheckConstraint("keep_days BETWEEN 1 AND 90", name="keep_days_in_range"),)

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    keep_days: Mapped[int] = mapped_column(Integer)
    opt_in_id: Mapped[str] = mapped_column(String(OPT_IN_LENGTH), server_default=text("''"))
    set_at: Mapped[datetime] = mapped_column(UtcDateTime)


class RequestContent(Base):
    """Text of one request and of its answers, encrypted. Times are Unix milliseconds of the database's clock."""

    __tablename__ = "request_contents"
    __table_args__ = (Index(None, "expires_ms"), Index(None, "tenant_id"))

    request_id: Mapped[str] = mapped_column(Text, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(Text)
    opt_in_id: Mapped[str] = mapped_column(String(OPT_IN_LENGTH), server_default=text("''"))
    sealed: Mapped[bytes] = mapped_column(LargeBinary)
    stored_ms: Mapped[int] = mapped_column(BigInteger)
    expires_ms: Mapped[int] = mapped_column(BigInteger)

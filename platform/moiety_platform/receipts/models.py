"""Tables of receipts."""

from __future__ import annotations

from sqlalchemy import BigInteger, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, DeploymentTable


class ReceiptChain(Base):
    """Head of a tenant's chain. Whoever appends locks the row, so that the chain never forks."""

    __tablename__ = "receipt_chains"

    tenant_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    num_receipts: Mapped[int] = mapped_column(BigInteger)
    head: Mapped[str] = mapped_column(String(64))  # hash of the newest receipt


class ReceiptRecord(Base):
    """One receipt. Content and salt are deleted with the tenant's data; number and hash stay."""

    __tablename__ = "receipts"
    __table_args__ = (Index(None, "tenant_id", "request_id", unique=True),)

    tenant_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    sequence: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    request_id: Mapped[str] = mapped_column(Text)
    project_id: Mapped[str] = mapped_column(String(32))
    hash: Mapped[str] = mapped_column(String(64))
    content: Mapped[str | None] = mapped_column(Text)  # canonical JSON
    salt: Mapped[str | None] = mapped_column(String(64))  # of its commitments; None: it has none


class ReceiptKeyRecord(DeploymentTable, Base):
    """Public key with which a gateway has signed receipts. Kept for as long as receipts are verified."""

    __tablename__ = "receipt_keys"

    key_id: Mapped[str] = mapped_column(String(16), primary_key=True)
    public_key: Mapped[str] = mapped_column(String(64))  # 32 bytes, in hexadecimal
    created_ms: Mapped[int] = mapped_column(BigInteger)

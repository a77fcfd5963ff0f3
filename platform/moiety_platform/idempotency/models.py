"""Tables of idempotency keys and stored answers.

`idempotent_requests` holds tenants' text: the answer in `body`. It is deleted when it expires, and at once for one
tenant with `KeyStore.erase`. There are no foreign keys, so a tenant's rows can be deleted in any order.
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import JSON, BigInteger, CheckConstraint, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base
from moiety_platform.tenants.models import ID_LENGTH


class State(StrEnum):
    RUNNING = "running"  # claimed by a gateway, which renews the claim until the request ends
    KEPT = "kept"
    NOT_KEPT = "not_kept"  # answered, but the answer was too large to store


class IdempotentRequest(Base):
    """One key of one tenant.

    Only hashes of the key and the request are stored. `claim_id` identifies the attempt that claims or claimed the key.
    `expires_ms` is Unix milliseconds of the database's clock.
    """

    __tablename__ = "idempotent_requests"
    __table_args__ = (
        CheckConstraint("state IN ('running', 'kept', 'not_kept')", name="state_known"),
        Index(None, "claim_id", unique=True),
        Index(None, "expires_ms"),
    )

    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    key_hash: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    fingerprint: Mapped[bytes] = mapped_column(LargeBinary)
    claim_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    state: Mapped[str] = mapped_column(String(16))
    expires_ms: Mapped[int] = mapped_column(BigInteger)
    num_bytes: Mapped[int] = mapped_column(BigInteger)  # of the body
    status: Mapped[int | None]
    headers: Mapped[dict[str, str] | None] = mapped_column(JSON(none_as_null=True))
    body: Mapped[bytes | None] = mapped_column(LargeBinary)


class IdempotencyTenant(Base):
    """Sums over a tenant's rows, maintained so that no request has to count them."""

    __tablename__ = "idempotency_tenants"

    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    num_keys: Mapped[int] = mapped_column(BigInteger)
    num_bytes: Mapped[int] = mapped_column(BigInteger)

"""The table of kept responses. Times are Unix milliseconds by the database's clock.

`responses` holds text of tenants: what was asked, in `items`, and what was answered, in `body`. Only what a request
asked to store is in it; it is deleted when it expires, when its tenant says so, and with its tenant.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base
from moiety_platform.tenants.models import ID_LENGTH

RESPONSE_ID_LENGTH = 40
MAX_MODEL_LENGTH = 512


class StoredResponse(Base):
    """One response and the items that were sent for it, both as JSON. `previous_id` is what it continues; `num_items`
    and `total_bytes` count the whole conversation up to here, so that it need not be read to be found too large."""

    __tablename__ = "responses"
    __table_args__ = (
        Index(None, "tenant_id", "num_bytes"),  # has all that the sums of a tenant need
        Index(None, "expires_ms"),
    )

    id: Mapped[str] = mapped_column(String(RESPONSE_ID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    project_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    model: Mapped[str] = mapped_column(String(MAX_MODEL_LENGTH))  # by the name that was asked for
    previous_id: Mapped[str | None] = mapped_column(String(RESPONSE_ID_LENGTH))
    num_items: Mapped[int]
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    total_bytes: Mapped[int] = mapped_column(BigInteger)
    expires_ms: Mapped[int] = mapped_column(BigInteger)
    items: Mapped[bytes] = mapped_column(LargeBinary)
    body: Mapped[bytes] = mapped_column(LargeBinary)

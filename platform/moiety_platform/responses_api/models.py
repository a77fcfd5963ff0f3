"""Table of stored responses. Times are Unix milliseconds of the database's clock.

`responses` holds tenants' text: input in `items`, the answer in `body`. It has only what a request asked to store. Rows
are deleted when they expire, when the tenant deletes them, and with the tenant.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Index, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base
from moiety_platform.tenants.models import ID_LENGTH

RESPONSE_ID_LENGTH = 40
MAX_MODEL_LENGTH = 512


class StoredResponse(Base):
    """One response and its input items, both as JSON.

    `previous_id` is the response that it continues. `num_items` and `total_bytes` count the whole conversation up to
    this response, so that its size can be checked without reading it. `running_until_ms` is set while a response is
    made in the background: its gateway extends it, so a time in the past means that the gateway has died.
    """

    __tablename__ = "responses"
    __table_args__ = (
        Index(None, "tenant_id", "num_bytes"),  # covers the sums of a tenant
        Index(None, "expires_ms"),
    )

    id: Mapped[str] = mapped_column(String(RESPONSE_ID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    project_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    model: Mapped[str] = mapped_column(String(MAX_MODEL_LENGTH))  # as named in the request
    previous_id: Mapped[str | None] = mapped_column(String(RESPONSE_ID_LENGTH))
    num_items: Mapped[int]
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    total_bytes: Mapped[int] = mapped_column(BigInteger)
    expires_ms: Mapped[int] = mapped_column(BigInteger)
    running_until_ms: Mapped[int | None] = mapped_column(BigInteger)
    items: Mapped[bytes] = mapped_column(LargeBinary)
    body: Mapped[bytes] = mapped_column(LargeBinary)

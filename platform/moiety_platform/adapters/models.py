"""Tables of adapters. Times are Unix milliseconds of the database's clock, sizes are bytes."""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import BigInteger, CheckConstraint, ColumnElement, Index, LargeBinary, String, Text, select
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base
from moiety_platform.prices.models import MAX_MODEL_LENGTH
from moiety_platform.tenants.models import ID_LENGTH

MAX_ADAPTER_NAME_LENGTH = 64
MAX_KEY_LENGTH = 128


class AdapterState(StrEnum):
    UPLOADING = "uploading"  # parts are arriving; requests cannot use it yet
    READY = "ready"
    DELETED = "deleted"  # requests cannot use it any more; its parts are being deleted


class Adapter(Base):
    """One adapter of a tenant.

    Its tensors are an object or, with `engine_adapter`, on the engines' hosts, where an operator has stored them under
    that name. While it is uploaded they are in chunks; so are those of version 0.1.0 until they have moved.
    """

    __tablename__ = "adapters"
    __table_args__ = (
        CheckConstraint("state IN ('uploading', 'ready', 'deleted')", name="state_known"),
        Index(None, "tenant_id", "model", "name", unique=True),
        Index(None, "state", "touched_ms"),
        Index(None, "object_key"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    model: Mapped[str] = mapped_column(String(MAX_MODEL_LENGTH))  # base model
    name: Mapped[str] = mapped_column(String(MAX_ADAPTER_NAME_LENGTH))
    state: Mapped[str] = mapped_column(String(16))
    config: Mapped[str] = mapped_column(Text)  # adapter_config.json
    num_bytes: Mapped[int] = mapped_column(BigInteger)  # bytes of adapter_model.safetensors received so far
    digest: Mapped[str | None] = mapped_column(String(64))  # SHA-256 of the tensors, once complete
    engine_adapter: Mapped[str | None] = mapped_column(String(MAX_ADAPTER_NAME_LENGTH))
    object_key: Mapped[str | None] = mapped_column(String(MAX_KEY_LENGTH))
    created_ms: Mapped[int] = mapped_column(BigInteger)
    touched_ms: Mapped[int] = mapped_column(BigInteger)  # time of the last addition


class AdapterChunk(Base):
    """Bytes of an upload's tensors from `start` on. They become an object when the adapter is published."""

    __tablename__ = "adapter_chunks"

    adapter_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    start: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    data: Mapped[bytes] = mapped_column(LargeBinary)

    @classmethod
    def of_tenant(cls, tenant_id: str) -> ColumnElement[bool]:
        """Return the condition for the rows of this tenant."""
        return cls.adapter_id.in_(select(Adapter.id).where(Adapter.tenant_id == tenant_id))

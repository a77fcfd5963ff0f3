"""Table of the policies for keys that developers make."""

from __future__ import annotations

from sqlalchemy import JSON, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base


class KeyPolicy(Base):
    """Policy of one tenant for keys that its users make for themselves. Without a row they make none.

    `max_days` is the longest lifetime, `allowed_models` the only models, None for no bound. `limits` are the highest
    caps of quotas by kind, which each key gets unless its maker asks for lower ones.
    """

    __tablename__ = "key_policies"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    makes_keys: Mapped[bool]
    max_keys: Mapped[int]
    max_days: Mapped[int | None]
    allowed_models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    limits: Mapped[dict[str, int]] = mapped_column(JSON)

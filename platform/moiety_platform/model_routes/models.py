"""Table of routes."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Double, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, SharedTable
from moiety_platform.prices.models import MAX_MODEL_LENGTH


class RouteRecord(SharedTable, Base):
    """One route. `targets` and `fallbacks` are JSON: objects with `model` and `weight`, and names of models."""

    __tablename__ = "routes"
    __table_args__ = (
        CheckConstraint("sticky IN ('none', 'tenant', 'conversation')", name="sticky_known"),
        CheckConstraint("(downgrade_model IS NULL) = (downgrade_percent IS NULL)", name="downgrade_complete"),
        CheckConstraint("(shadow_model IS NULL) = (shadow_percent IS NULL)", name="shadow_complete"),
    )

    name: Mapped[str] = mapped_column(String(MAX_MODEL_LENGTH), primary_key=True)
    targets: Mapped[str] = mapped_column(Text)
    fallbacks: Mapped[str] = mapped_column(Text)
    sticky: Mapped[str] = mapped_column(String(16))
    downgrade_model: Mapped[str | None] = mapped_column(String(MAX_MODEL_LENGTH))
    downgrade_percent: Mapped[int | None]
    shadow_model: Mapped[str | None] = mapped_column(String(MAX_MODEL_LENGTH))
    shadow_percent: Mapped[float | None] = mapped_column(Double)

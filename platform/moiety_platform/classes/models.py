"""Table of service classes."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Double, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, SharedTable

MAX_CLASS_NAME_LENGTH = 32


class ClassRecord(SharedTable, Base):
    """One class. Each tenant names the best class that it may use, so a class in use cannot be deleted."""

    __tablename__ = "service_classes"
    __table_args__ = (
        CheckConstraint("on_overload IN ('reject', 'queue', 'downgrade')", name="on_overload_known"),
        CheckConstraint("on_overload <> 'downgrade' OR downgrade_to IS NOT NULL", name="downgrade_has_target"),
        CheckConstraint("ttft_s IS NOT NULL OR completion_s IS NOT NULL", name="promises_something"),
    )

    name: Mapped[str] = mapped_column(String(MAX_CLASS_NAME_LENGTH), primary_key=True)
    rank: Mapped[int]
    weight: Mapped[float] = mapped_column(Double)
    ttft_s: Mapped[float | None] = mapped_column(Double)
    ttft_per_1k_s: Mapped[float] = mapped_column(Double)
    tpot_s: Mapped[float | None] = mapped_column(Double)
    completion_s: Mapped[float | None] = mapped_column(Double)
    max_queue_s: Mapped[float] = mapped_column(Double)
    preemptible: Mapped[bool]
    on_overload: Mapped[str] = mapped_column(String(16))
    price_factor: Mapped[float] = mapped_column(Double)
    credit_percent: Mapped[int] = mapped_column(server_default="0")
    spot_floor_percent: Mapped[int | None]  # both bounds, or neither
    spot_ceiling_percent: Mapped[int | None]
    downgrade_to: Mapped[str | None] = mapped_column(String(MAX_CLASS_NAME_LENGTH), ForeignKey("service_classes.name"))

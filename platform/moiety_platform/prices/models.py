"""Table of prices, in nano-dollars per million tokens."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.classes.models import MAX_CLASS_NAME_LENGTH
from moiety_platform.db.base import Base, SharedTable

MAX_MODEL_LENGTH = 256


class PriceRecord(SharedTable, Base):
    """Price of a model in one class, or (without a class's name) in all classes, times the class's factor."""

    __tablename__ = "prices"
    __table_args__ = (
        CheckConstraint("input >= 0 AND output >= 0", name="not_negative"),
        CheckConstraint("cached_input >= 0 AND cached_input <= input", name="cached_not_dearer"),
    )

    model: Mapped[str] = mapped_column(String(MAX_MODEL_LENGTH), primary_key=True)
    service_class: Mapped[str] = mapped_column(String(MAX_CLASS_NAME_LENGTH), primary_key=True)
    input: Mapped[int] = mapped_column(BigInteger)
    cached_input: Mapped[int] = mapped_column(BigInteger)
    output: Mapped[int] = mapped_column(BigInteger)

"""Table of published spot prices."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.classes.models import MAX_CLASS_NAME_LENGTH
from moiety_platform.db.base import Base, SharedTable


class SpotPriceRecord(SharedTable, Base):
    """Price of a spot class for one model in one interval. The first gateway to need it writes it; all gateways use it.

    Times are Unix milliseconds of the database's clock.
    """

    __tablename__ = "spot_prices"
    __table_args__ = (CheckConstraint("percent BETWEEN 1 AND 100", name="percent_in_range"),)

    model: Mapped[str] = mapped_column(String(256), primary_key=True)
    service_class: Mapped[str] = mapped_column(String(MAX_CLASS_NAME_LENGTH), primary_key=True)
    starts_ms: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    ends_ms: Mapped[int] = mapped_column(BigInteger, index=True)
    percent: Mapped[int]  # of the class's price
    idle_percent: Mapped[int]  # predicted idle capacity, from which the price was computed

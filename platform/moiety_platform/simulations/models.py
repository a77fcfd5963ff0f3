"""Table of simulations: the running one, and the results of the last ones."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Index, SmallInteger, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, DeploymentTable

ID_LENGTH = 32


class SimulationRecord(DeploymentTable, Base):
    """One simulation; times are Unix milliseconds of the database's clock.

    The running simulation holds the only slot, and counts as dead when `alive_ms` is too old. It contains neither names
    nor figures of tenants.
    """

    __tablename__ = "simulations"
    __table_args__ = (UniqueConstraint("slot"), Index(None, "created_ms", "id"))

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    slot: Mapped[int | None] = mapped_column(SmallInteger)
    state: Mapped[str] = mapped_column(String(16))  # running, done, failed, cancelled
    created_ms: Mapped[int] = mapped_column(BigInteger)
    alive_ms: Mapped[int] = mapped_column(BigInteger)
    settings: Mapped[dict[str, Any]] = mapped_column(JSON)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    problem: Mapped[str | None] = mapped_column(Text)

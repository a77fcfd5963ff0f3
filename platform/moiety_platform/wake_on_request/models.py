"""Tables by which gateways agree which engines to wake."""

from __future__ import annotations

from sqlalchemy import BigInteger, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, DeploymentTable
from moiety_platform.prices.models import MAX_MODEL_LENGTH

OWNER_LENGTH = 64
NAME_LENGTH = 16
ADDRESS_LENGTH = 300


class WakeDemand(DeploymentTable, Base):
    """Requests of one gateway process that wait for an engine of a model. Times are of the database's clock."""

    __tablename__ = "wake_demands"

    model: Mapped[str] = mapped_column(String(MAX_MODEL_LENGTH), primary_key=True)
    owner: Mapped[str] = mapped_column(String(OWNER_LENGTH), primary_key=True)
    num_waiting: Mapped[int] = mapped_column(Integer)
    slo_ms: Mapped[int] = mapped_column(BigInteger)  # when the first request misses its SLO
    since_ms: Mapped[int] = mapped_column(BigInteger)  # since when the model is needed and has no awake engine
    expires_ms: Mapped[int] = mapped_column(BigInteger)


class WakeLease(DeploymentTable, Base):
    """The gateway process that wakes engines and puts them to sleep."""

    __tablename__ = "wake_leases"

    name: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    owner: Mapped[str] = mapped_column(String(OWNER_LENGTH))
    expires_ms: Mapped[int] = mapped_column(BigInteger)


class WakeTime(DeploymentTable, Base):
    """Measured time until an engine of a model served after it was woken, or started."""

    __tablename__ = "wake_times"

    model: Mapped[str] = mapped_column(String(MAX_MODEL_LENGTH), primary_key=True)
    kind: Mapped[str] = mapped_column(String(NAME_LENGTH), primary_key=True)
    wake_ms: Mapped[int] = mapped_column(BigInteger)


class WakeSwitch(DeploymentTable, Base):
    """An engine of a device group that was put to sleep for another model, until that model or the engine is awake."""

    __tablename__ = "wake_switches"

    address: Mapped[str] = mapped_column(String(ADDRESS_LENGTH), primary_key=True)
    model: Mapped[str] = mapped_column(String(MAX_MODEL_LENGTH))  # for which it gave way
    at_ms: Mapped[int] = mapped_column(BigInteger)

"""Shared parts of all tables: the declarative base, the constraint names, and the type for points in time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, DateTime, Dialect, MetaData, Numeric, false
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator, TypeEngine

SQLITE_MAX = 2**63 - 1  # largest integer of SQLite
REMEMBERED = 1024  # cached points in time: many rows of a transaction share one

NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    """Base class of all ORM models."""

    metadata = MetaData(naming_convention=NAMING_CONVENTION)


class SharedTable:
    """Mixin of a table whose rows have no tenant, and may be read by the administrators of every tenant."""


class DeploymentTable:
    """Mixin of a table whose rows belong to the deployment: no administrator of one tenant sees them."""

    @classmethod
    def of_tenant(cls, _tenant_id: str) -> ColumnElement[bool]:
        """Return the condition for the rows of a tenant, which are none."""
        return false()


class WideInteger(TypeDecorator[int]):
    """Column type for sums of bytes: integers of up to 38 digits on PostgreSQL, of 64 bits on SQLite.

    A few large engines read more than 2^63 bytes of weights in a month. On SQLite, a larger number is stored as
    `SQLITE_MAX`: SQLite itself would store an inexact float.
    """

    impl = BigInteger
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the database's type."""
        kind = Numeric(38, 0) if dialect.name == "postgresql" else BigInteger()
        return dialect.type_descriptor(kind)

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        """Return the value, limited to what the database can store."""
        if value is None or dialect.name != "sqlite":
            return value
        return max(-SQLITE_MAX, min(value, SQLITE_MAX))

    def process_result_value(self, value: Any, dialect: Dialect) -> int | None:
        """Return the value as an integer; PostgreSQL's driver returns a decimal number."""
        return None if value is None else int(value)


class UtcDateTime(TypeDecorator[datetime]):
    """Column type for aware UTC times.

    It is `timestamptz` on PostgreSQL; on SQLite, which has none, UTC text that sorts by time.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def bind_processor(self, dialect: Dialect) -> Callable[[datetime | None], Any] | None:
        """Return a processor that converts directly to text on SQLite, because rows have several times each."""
        return _to_text if dialect.name == "sqlite" else super().bind_processor(dialect)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], datetime | None] | None:
        """Return a processor that converts directly from text on SQLite."""
        return _from_text if dialect.name == "sqlite" else super().result_processor(dialect, coltype)

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else _in_utc(value)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        moment: datetime = value
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _in_utc(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ValueError("a point in time must be aware; give it tzinfo=UTC")
    return moment if moment.tzinfo is UTC else moment.astimezone(UTC)


@lru_cache(maxsize=REMEMBERED)
def _to_text(moment: datetime | None) -> str | None:
    return None if moment is None else _in_utc(moment).replace(tzinfo=None).isoformat(" ", "microseconds")


@lru_cache(maxsize=REMEMBERED)
def _from_text(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text).replace(tzinfo=UTC)

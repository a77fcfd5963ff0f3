"""Columns that many tables have. Revisions before 0040 use only the functions for several columns of one type.

Applied revisions use these functions: a function that changes would change the tables of new databases only. Add a
function instead.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

T = TypeVar("T")


def text_key(name: str, length: int) -> sa.Column[str]:
    """Return a text column of the primary key."""
    return sa.Column(name, sa.String(length), primary_key=True)


def required_text(name: str, length: int) -> sa.Column[str]:
    """Return a text column without null."""
    return sa.Column(name, sa.String(length), nullable=False)


def optional_text(name: str, length: int) -> sa.Column[str]:
    """Return a text column with null."""
    return sa.Column(name, sa.String(length))


def object_id() -> sa.Column[str]:
    """Return the column `id` of an object."""
    return text_key("id", 32)


def tenant_key() -> sa.Column[str]:
    """Return the column `tenant_id` of a table whose rows belong to one tenant, as part of the primary key."""
    return text_key("tenant_id", 32)


def required_count(name: str) -> sa.Column[int]:
    """Return a column of a count or percentage, without null."""
    return sa.Column(name, sa.Integer(), nullable=False)


def required_ms(name: str) -> sa.Column[int]:
    """Return a column of milliseconds, since 1970 or of a duration, without null."""
    return sa.Column(name, sa.BigInteger(), nullable=False)


def required_json(name: str) -> sa.Column[Any]:
    """Return a JSON column without null."""
    return sa.Column(name, sa.JSON(), nullable=False)


def required_time(name: str) -> sa.Column[datetime]:
    """Return a column of times in UTC, without null."""
    return sa.Column(name, sa.DateTime(timezone=True), nullable=False)


def required_columns(kind: TypeEngine[T], *names: str) -> list[sa.Column[T]]:
    """Return columns of one type without null, in the order of their names."""
    return [sa.Column(name, kind, nullable=False) for name in names]


def optional_columns(kind: TypeEngine[T], *names: str) -> list[sa.Column[T]]:
    """Return columns of one type with null, in the order of their names."""
    return [sa.Column(name, kind) for name in names]


def key_columns(kind: TypeEngine[T], *names: str) -> list[sa.Column[T]]:
    """Return columns of one type that are part of the primary key, in the order of their names."""
    return [sa.Column(name, kind, primary_key=True) for name in names]

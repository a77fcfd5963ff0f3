"""Arithmetic of byte sums that can exceed 64 bits, which SQLite's integers cannot.

SQLite's `sum()` fails beyond 2^63 and its `+` returns an inexact float. So reports add the upper and the lower parts of
numbers separately, and stored sums stop at `SQLITE_MAX`. PostgreSQL stores and adds wide integers itself.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, ColumnElement, case, cast, func, literal_column
from sqlalchemy.dialects import sqlite

from moiety_platform.db.base import SQLITE_MAX, WideInteger

LOW_BITS = 32  # of the lower part: sums of fewer than 2^31 rows fit into 64 bits
_LOW_MASK = 2**LOW_BITS - 1
_MAX = literal_column(str(SQLITE_MAX), BigInteger())
_MAX_HIGH = SQLITE_MAX >> LOW_BITS


def low_part(dialect: str, value: ColumnElement[int]) -> ColumnElement[int]:
    """Return the lowest `LOW_BITS` bits of a number on SQLite, the whole number on PostgreSQL."""
    return value.bitwise_and(_LOW_MASK) if dialect == "sqlite" else cast(value, WideInteger)


def high_part(dialect: str, value: ColumnElement[int]) -> ColumnElement[int]:
    """Return what `low_part` leaves out of a number, divided by 2^`LOW_BITS`; 0 on PostgreSQL."""
    return value.bitwise_rshift(LOW_BITS) if dialect == "sqlite" else literal_column("0", BigInteger())


def join_parts(high: int, low: int) -> int:
    """Return the number whose sums of parts these are."""
    return (high << LOW_BITS) + low


def stored_sum(dialect: str, column: ColumnElement[int]) -> ColumnElement[int]:
    """Return the sum over a group, as it is stored; on SQLite at most `SQLITE_MAX`."""
    if dialect != "sqlite":
        return func.sum(column)
    high, low = func.sum(high_part(dialect, column)), func.sum(low_part(dialect, column))
    is_too_large = high + low.bitwise_rshift(LOW_BITS) > _MAX_HIGH
    return case((is_too_large, _MAX), else_=high.bitwise_lshift(LOW_BITS) + low)


def raised_sum(insert: Any, stored: ColumnElement[int], more: ColumnElement[int]) -> ColumnElement[int]:
    """Return a stored sum plus what an upsert adds; on SQLite at most `SQLITE_MAX`."""
    if not isinstance(insert, sqlite.Insert):
        return stored + more
    return case(((more > 0) & (stored > _MAX - more), _MAX), else_=stored + more)

"""The database's clock, moved by hand. A statement reads it when it is executed, however long ago it was built."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Dialect, literal
from sqlalchemy.types import TypeDecorator, TypeEngine


class DatabaseClock:
    def __init__(self) -> None:
        self.ms = 1_800_000_000_000

    def advance(self, seconds: float) -> None:
        self.ms += round(seconds * 1000)

    def now(self) -> ColumnElement[int]:
        return literal(0, ClockReading(self))


class ClockReading(TypeDecorator[int]):
    """The type of a parameter whose value is the clock's reading at execution.

    The type is part of SQLAlchemy's cache key, so that a cached statement of other parameters is never taken for one
    that reads a clock (a `bindparam` with a callable is: its value is then NULL).
    """

    impl = BigInteger
    cache_ok = True

    def __init__(self, clock: DatabaseClock) -> None:
        super().__init__()
        self.clock = clock

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int:
        return self.clock.ms

    def coerce_compared_value(self, op: Any, value: Any) -> TypeEngine[Any]:
        return BigInteger()

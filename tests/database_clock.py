"""The database's clock, moved by hand. A statement asks it as it is run, however long ago it was built."""

from __future__ import annotations

from sqlalchemy import BigInteger, ColumnElement, bindparam


class DatabaseClock:
    def __init__(self) -> None:
        self.ms = 1_800_000_000_000

    def advance(self, seconds: float) -> None:
        self.ms += round(seconds * 1000)

    def now(self) -> ColumnElement[int]:
        return bindparam(None, callable_=lambda: self.ms, type_=BigInteger, unique=True)

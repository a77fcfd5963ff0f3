"""Many rows by one statement, as tuples: the driver takes them as they are, and what SQLAlchemy would do for each row,
which at some hundred rows holds up the event loop for milliseconds, is done once for the statement."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Dialect, Table
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import Base
from moiety_platform.db.dialect import insert_of

_Bind = Callable[[Any], Any]
_VALUES = re.compile(r" VALUES (\((?:[^()]|\([^()]*\))*\))")
_NUMBERED = re.compile(r"\$(\d+)")  # a parameter on PostgreSQL


class BulkInsert:
    """Inserts rows of one table. `finish` gives the dialect's insert its other clauses, which have no parameters."""

    def __init__(self, model: type[Base], finish: Callable[[Any], Any] = lambda insert: insert) -> None:
        assert isinstance(model.__table__, Table)
        self._table = model.__table__
        self._finish = finish
        self._texts: dict[tuple[str, int], str] = {}
        self._compiled: dict[str, tuple[str, list[tuple[int, _Bind]]]] = {}  # by the dialect's name

    async def __call__(self, session: AsyncSession, rows: Sequence[tuple[Any, ...]]) -> None:
        """Once with each row: the values of all columns in the table's order."""
        if not rows:
            return
        text, binds = self._of(session.get_bind().dialect)
        connection = await session.connection()
        await connection.exec_driver_sql(text, _bound(rows, binds))

    async def returning(self, session: AsyncSession, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """All of them by one statement, which has a text for each number of rows; what it returns, a value a row."""
        if not rows:
            return []
        dialect = session.get_bind().dialect
        text, binds = self._of(dialect)
        connection = await session.connection()
        values = tuple(itertools.chain.from_iterable(_bound(rows, binds)))
        result = await connection.exec_driver_sql(self._repeated(dialect.name, text, len(rows)), values)
        return list(result.scalars())

    def _repeated(self, dialect: str, text: str, num_rows: int) -> str:
        """The statement with so many rows of values."""
        known = self._texts.get((dialect, num_rows))
        if known is None:
            width, group = len(self._table.columns), _VALUES.search(text)
            assert group is not None, "an insert has values"
            groups = (
                _NUMBERED.sub(lambda number, first=row * width: f"${first + int(number[1])}", group[1])
                for row in range(num_rows)
            )
            known = text[: group.start(1)] + ", ".join(groups) + text[group.end(1) :]
            self._texts[dialect, num_rows] = known
        return known

    def _of(self, dialect: Dialect) -> tuple[str, list[tuple[int, _Bind]]]:
        return self._compiled.get(dialect.name) or self._compile(dialect)

    def _compile(self, dialect: Dialect) -> tuple[str, list[tuple[int, _Bind]]]:
        """The text, and what turns a column's values into the driver's, where anything has to."""
        names = [column.name for column in self._table.columns]
        compiled = self._finish(insert_of(dialect, self._table)).compile(dialect=dialect, column_keys=names)
        assert compiled.positiontup == names, "nothing but the row's values, in their order"
        binds = [
            (index, bind)
            for index, column in enumerate(self._table.columns)
            if (bind := column.type.dialect_impl(dialect).bind_processor(dialect)) is not None
        ]
        found = self._compiled[dialect.name] = str(compiled), binds
        return found


def _bound(rows: Sequence[tuple[Any, ...]], binds: Sequence[tuple[int, _Bind]]) -> list[tuple[Any, ...]]:
    if not binds:
        return list(rows)
    columns = list(zip(*rows, strict=True))
    for index, bind in binds:
        columns[index] = tuple(map(bind, columns[index]))
    return list(zip(*columns, strict=True))

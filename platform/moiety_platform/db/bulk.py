"""Many rows by one statement, as tuples: the driver takes them as they are, and what SQLAlchemy would do for each row,
which at some hundred rows holds up the event loop for milliseconds, is done once for the statement."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Dialect, Table
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import Base
from moiety_platform.db.dialect import insert_of

_Bind = Callable[[Any], Any]
_VALUES = re.compile(r" VALUES (\((?:[^()]|\([^()]*\))*\))")


class BulkInsert:
    """Inserts rows of one table. `finish` gives the dialect's insert its other clauses, which have no parameters."""

    def __init__(self, model: type[Base], finish: Callable[[Any], Any] = lambda insert: insert) -> None:
        assert isinstance(model.__table__, Table)
        self._table = model.__table__
        self._finish = finish
        self._from_json: dict[str, str] = {}
        self._compiled: dict[str, tuple[str, list[tuple[int, _Bind]]]] = {}  # by the dialect's name

    async def __call__(self, session: AsyncSession, rows: Sequence[tuple[Any, ...]]) -> None:
        """Once with each row: the values of all columns in the table's order."""
        if not rows:
            return
        text, binds = self._of(session.get_bind().dialect)
        connection = await session.connection()
        await connection.exec_driver_sql(text, _bound(rows, binds))

    async def returning(self, session: AsyncSession, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """All of them by one statement; what it returns, a value a row."""
        if not rows:
            return []
        dialect = session.get_bind().dialect
        text, binds = self._of(dialect)
        known = self._from_json.get(dialect.name) or self._read_from_json(dialect, text)
        connection = await session.connection()
        result = await connection.exec_driver_sql(known, (msgspec.json.encode(_bound(rows, binds)).decode(),))
        return list(result.scalars())

    def _read_from_json(self, dialect: Dialect, text: str) -> str:
        """The statement for any number of rows, which are one parameter: with a parameter for each value there would
        be a statement for each number of rows, and every connection would keep them all."""
        values = _VALUES.search(text)
        assert values is not None, "an insert has values"
        if dialect.name == "postgresql":
            types = [column.type.compile(dialect) for column in self._table.columns]
            read = ", ".join(f"CAST(value ->> {place} AS {kind})" for place, kind in enumerate(types))
            source = f" SELECT {read} FROM json_array_elements($1::json)"
        else:
            read = ", ".join(f"json_extract(value, '$[{place}]')" for place in range(len(self._table.columns)))
            source = f" SELECT {read} FROM json_each(?) WHERE true"  # without WHERE, ON would be taken for a join's
        found = self._from_json[dialect.name] = text[: values.start()] + source + text[values.end() :]
        return found

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

"""Many rows by one statement with one parameter: a JSON document, which the database takes apart.

A parameter for each value would make a statement for each number of rows, which takes time to prepare and stays in the
memory of every connection; a call for each row would hand the interpreter to another thread and back for each. So a
statement is the same for any number of rows, and all its work is done in one call. What is read comes back in the same
way, for SQLite's driver makes a call for each row that it fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import (
    JSON,
    ColumnElement,
    Dialect,
    LargeBinary,
    Select,
    String,
    Table,
    bindparam,
    case,
    cast,
    func,
    literal_column,
    select,
    true,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import Base
from moiety_platform.db.dialect import insert_of

Row = Sequence[Any]
_Columns = Sequence[ColumnElement[Any]]


class BulkInsert:
    """Inserts rows of one table. `finish` gives the dialect's insert its other clauses, which have no parameters."""

    def __init__(self, model: type[Base], finish: Callable[[Any], Any] = lambda insert: insert) -> None:
        assert isinstance(model.__table__, Table)
        self._table = model.__table__
        self._columns = list(self._table.columns)
        self._finish = finish
        self._statements: dict[str, Any] = {}  # by the dialect's name

    async def __call__(self, session: AsyncSession, rows: Sequence[Row]) -> int:
        """All of them, as the values of all columns in the table's order; how many of them came into the table, or were
        changed there."""
        if not rows:
            return 0
        dialect = session.get_bind().dialect
        statement = self._statements.get(dialect.name)
        if statement is None:
            source = _read(dialect, self._columns, bindparam("rows", type_=String))
            insert = insert_of(dialect, self._table).from_select(self._columns, source)
            finished = self._finish(insert).execution_options(preserve_rowcount=True)
            statement = self._statements[dialect.name] = finished
        connection = await session.connection()
        result = await connection.execute(statement, {"rows": _document(dialect, self._columns, rows)})
        return result.rowcount


class BulkAdd:
    """Adds to a column of the rows of one table that have these values in `keys`. It locks them in no order of its own:
    whoever calls has locked them, or what stands before them."""

    def __init__(self, model: type[Base], column: str, keys: Sequence[str]) -> None:
        assert isinstance(model.__table__, Table)
        self._table = model.__table__
        self._column = self._table.c[column]
        self._keys = [self._table.c[name] for name in keys]
        self._statements: dict[str, Any] = {}  # by the dialect's name

    async def __call__(self, session: AsyncSession, amounts: Mapping[tuple[Any, ...], int]) -> None:
        """What is added to each, by its key. What is not there is left out."""
        if not amounts:
            return
        dialect, columns = session.get_bind().dialect, [*self._keys, self._column]
        statement = self._statements.get(dialect.name)
        if statement is None:
            given = _read(dialect, columns, bindparam("rows", type_=String)).subquery()
            same = [column == given.c[column.key] for column in self._keys]
            added = {self._column: self._column + given.c[self._column.key]}
            statement = self._statements[dialect.name] = update(self._table).where(*same).values(added)
        rows = [(*key, amount) for key, amount in amounts.items()]
        connection = await session.connection()
        await connection.execute(statement, {"rows": _document(dialect, columns, rows)})


async def read_rows(session: AsyncSession, statement: Select[*tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
    """What a select of columns finds: many rows, in no order, and, but for bytes, nothing that JSON has no word for."""
    dialect = session.get_bind().dialect
    if dialect.name != "sqlite":
        return (await session.execute(statement)).all()
    columns = list(statement.subquery().c)
    told = [_in_hex(column) if isinstance(column.type, LargeBinary) else column for column in columns]
    document: Any = await session.scalar(select(func.json_group_array(func.json_array(*told))))
    by_column = list(zip(*msgspec.json.decode(document), strict=True))
    for place, column in enumerate(columns[: len(by_column)]):
        if isinstance(column.type, LargeBinary):
            by_column[place] = tuple(None if text is None else bytes.fromhex(text) for text in by_column[place])
            continue
        of_driver = column.type.dialect_impl(dialect).result_processor(dialect, None)
        if of_driver is not None:
            by_column[place] = tuple(map(of_driver, by_column[place]))
    return list(zip(*by_column, strict=True))


def _in_hex(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """Bytes as a text, and null as null."""
    return case((column.is_not(None), func.hex(column)))


async def lock_rows(session: AsyncSession, statement: Select[*tuple[Any, ...]]) -> None:
    """Lock what a select `with_for_update` finds, in its order, until the transaction's end. Whoever writes to SQLite
    has the whole database locked."""
    if session.get_bind().dialect.name != "sqlite":
        await session.execute(select(func.count()).select_from(statement.subquery()))


def listed(session: AsyncSession, columns: Sequence[Any], rows: Iterable[Row]) -> Select[Any]:
    """The rows as a subquery, for a column's own `in_` or an insert; `among` is for several columns."""
    dialect, found = session.get_bind().dialect, [column.expression for column in columns]
    return _read(dialect, found, bindparam(None, _document(dialect, found, list(rows)), String))


def among(session: AsyncSession, columns: Sequence[Any], rows: Iterable[Row]) -> ColumnElement[bool]:
    """Whether the columns are one of the rows, none of which has bytes. SQLite looks the rows up in an index so; those
    that stand in the statement itself it compares with every row of the table."""
    return tuple_(*columns).in_(listed(session, columns, rows))


def _read(dialect: Dialect, columns: _Columns, document: ColumnElement[str]) -> Select[Any]:
    """What takes the document apart."""
    values: list[ColumnElement[Any]]
    if dialect.name == "postgresql":
        each = func.json_array_elements(cast(document, JSON)).table_valued("value")
        values = [
            cast(each.c.value.op("->>")(literal_column(str(place))), column.type)
            for place, column in enumerate(columns)
        ]
    else:
        each = func.json_each(document).table_valued("value")
        values = [
            func.json_extract(each.c.value, literal_column(f"'$[{place}]'"), type_=column.type)
            for place, column in enumerate(columns)
        ]
    named = [value.label(column.key) for value, column in zip(values, columns, strict=True)]
    return select(*named).where(true())  # without WHERE, SQLite would take an insert's ON for a join's


def _document(dialect: Dialect, columns: _Columns, rows: Sequence[Row]) -> str:
    """The rows as the database's own types, where JSON has no word for a value's."""
    by_column = list(zip(*rows, strict=True)) or [()] * len(columns)
    for place, column in enumerate(columns):
        bind = column.type.dialect_impl(dialect).bind_processor(dialect)
        if bind is not None:
            by_column[place] = tuple(map(bind, by_column[place]))
    return msgspec.json.encode(list(zip(*by_column, strict=True))).decode()

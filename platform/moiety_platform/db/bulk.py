"""Many rows by one statement with one parameter: a JSON document, which the database takes apart.

A parameter for each value would make a statement for each number of rows, which takes time to prepare and stays in the
memory of every connection; a call for each row would hand the interpreter to another thread and back for each. So a
statement is the same for any number of rows, and all its work is done in one call. What is read comes back in the same
way, for SQLite's driver makes a call for each row that it fetches. And the statement is built once: to build it takes
longer than the database takes to run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import (
    JSON,
    ColumnElement,
    CursorResult,
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


class OverRows:
    """A statement over rows that each call gives, values of `columns`. `build` makes it of a select of these rows, once
    for each dialect; other values of a call are `bindparam`s in it. It is what the database gets: a restriction of the
    session does not touch it."""

    def __init__(self, columns: Sequence[Any], build: Callable[[Select[Any], Dialect], Any]) -> None:
        self._columns = [column.expression for column in columns]
        self._build = build
        self._statements: dict[str, Any] = {}  # by the dialect's name
        self._reading: _Reading | None = None

    async def execute(self, session: AsyncSession, rows: Iterable[Row], **own: Any) -> CursorResult[Any]:
        """Run it."""
        dialect = session.get_bind().dialect
        return await self._run(session, self._statement(dialect), rows, own)

    async def read(self, session: AsyncSession, rows: Iterable[Row], **own: Any) -> Sequence[tuple[Any, ...]]:
        """What a select of columns finds: many rows, in no order, and, but for bytes, nothing that JSON has no word
        for."""
        dialect = session.get_bind().dialect
        statement = self._statement(dialect)
        if dialect.name != "sqlite":
            return (await self._run(session, statement, rows, own)).all()
        if self._reading is None:
            self._reading = _Reading(statement, dialect)
        found = await self._run(session, self._reading.statement, rows, own)
        return self._reading.rows_of(found.scalar_one())

    async def lock(self, session: AsyncSession, rows: Iterable[Row], **own: Any) -> None:
        """Lock what a select `with_for_update` finds, in its order, until the transaction's end. Whoever writes to
        SQLite has the whole database locked."""
        dialect = session.get_bind().dialect
        if dialect.name != "sqlite":
            await self._run(session, self._statement(dialect), rows, own)

    def _statement(self, dialect: Dialect) -> Any:
        statement = self._statements.get(dialect.name)
        if statement is None:
            given = _read(dialect, self._columns, bindparam("rows", type_=String))
            statement = self._statements[dialect.name] = self._build(given, dialect)
        return statement

    async def _run(
        self, session: AsyncSession, statement: Any, rows: Iterable[Row], own: Mapping[str, Any]
    ) -> CursorResult[Any]:
        connection = await session.connection()
        document = _document(connection.dialect, self._columns, list(rows))
        found: CursorResult[Any] = await connection.execute(statement, {"rows": document, **own})
        return found


class _Reading:
    """All that a select finds as one document, and how it is taken apart again."""

    def __init__(self, statement: Select[Any], dialect: Dialect) -> None:
        columns = list(statement.subquery().c)
        told = [_in_hex(column) if isinstance(column.type, LargeBinary) else column for column in columns]
        self.statement = select(func.json_group_array(func.json_array(*told)))
        self._of_driver = [
            _of_hex if isinstance(column.type, LargeBinary) else _result_of(column, dialect) for column in columns
        ]

    def rows_of(self, document: str) -> list[tuple[Any, ...]]:
        by_column = list(zip(*msgspec.json.decode(document), strict=True))
        for place, convert in enumerate(self._of_driver[: len(by_column)]):
            if convert is not None:
                by_column[place] = tuple(map(convert, by_column[place]))
        return list(zip(*by_column, strict=True))


def _in_hex(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """Bytes as a text, and null as null."""
    return case((column.is_not(None), func.hex(column)))


def _of_hex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def _result_of(column: ColumnElement[Any], dialect: Dialect) -> Callable[[Any], Any] | None:
    """What the driver makes of a value of the column."""
    return column.type.dialect_impl(dialect).result_processor(dialect, None)


class BulkInsert(OverRows):
    """Inserts rows of one table. `finish` gives the dialect's insert its other clauses, which have no parameters."""

    def __init__(self, model: type[Base], finish: Callable[[Any], Any] = lambda insert: insert) -> None:
        table = model.__table__
        assert isinstance(table, Table)
        columns = list(table.columns)

        def build(given: Select[Any], dialect: Dialect) -> Any:
            insert = insert_of(dialect, table).from_select(columns, given)
            return finish(insert).execution_options(preserve_rowcount=True)

        super().__init__(columns, build)

    async def __call__(self, session: AsyncSession, rows: Sequence[Row]) -> int:
        """All of them, as the values of all columns in the table's order; how many of them came into the table, or were
        changed there."""
        return (await self.execute(session, rows)).rowcount if rows else 0


class BulkAdd(OverRows):
    """Adds to a column of the rows of one table that have these values in `keys`. It locks them in no order of its own:
    whoever calls has locked them, or what stands before them."""

    def __init__(self, model: type[Base], column: str, keys: Sequence[str]) -> None:
        table = model.__table__
        assert isinstance(table, Table)
        named, raised = [table.c[name] for name in keys], table.c[column]

        def build(rows: Select[Any], _: Dialect) -> Any:
            given = rows.subquery()
            same = [key == given.c[key.key] for key in named]
            return update(table).where(*same).values({raised: raised + given.c[raised.key]})

        super().__init__([*named, raised], build)

    async def __call__(self, session: AsyncSession, amounts: Mapping[tuple[Any, ...], int]) -> None:
        """What is added to each, by its key. What is not there is left out."""
        if amounts:
            await self.execute(session, [(*key, amount) for key, amount in amounts.items()])


def among(session: AsyncSession, columns: Sequence[Any], rows: Iterable[Row]) -> ColumnElement[bool]:
    """Whether the columns are one of the rows, none of which has bytes, in a statement that is seldom run. SQLite looks
    the rows up in an index so; those that stand in the statement itself it compares with every row of the table."""
    dialect, found = session.get_bind().dialect, [column.expression for column in columns]
    document = bindparam(None, _document(dialect, found, list(rows)), String)
    return tuple_(*columns).in_(_read(dialect, found, document))


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

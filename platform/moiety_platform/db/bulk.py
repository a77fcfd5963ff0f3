"""Bulk statements: many rows in one statement with one parameter, a JSON document that the database unpacks.

One parameter per value would make a separate statement for each number of rows; each takes time to prepare and stays in
the memory of every connection. One call per row would switch interpreter threads twice per row. Here a statement is the
same for any number of rows, and one call does all its work. Reads return their rows the same way, because SQLite's
driver makes a call for each row that it fetches. The statement is built once, because building it takes longer than the
database takes to run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import (
    JSON,
    BigInteger,
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


class BulkStatement:
    """Statement over the rows of each call, whose values belong to `columns`.

    `build` makes the statement from a select of these rows, once per dialect; other values of a call are `bindparam`s
    in it. The statement reaches the database unchanged: a session restriction does not apply to it.
    """

    def __init__(self, columns: Sequence[Any], build: Callable[[Select[Any], Dialect], Any]) -> None:
        self._columns = [column.expression for column in columns]
        self._build = build
        self._statements: dict[str, Any] = {}  # by the dialect's name
        self._reading: _Reading | None = None

    async def execute(self, session: AsyncSession, rows: Iterable[Row], **own: Any) -> CursorResult[Any]:
        """Run the statement on the rows."""
        dialect = session.get_bind().dialect
        return await self._run(session, self._statement(dialect), rows, own)

    async def read(self, session: AsyncSession, rows: Iterable[Row], **own: Any) -> Sequence[tuple[Any, ...]]:
        """Return the rows that a select of columns finds, unordered; for many rows.

        Apart from bytes, their values must exist in JSON.
        """
        dialect = session.get_bind().dialect
        statement = self._statement(dialect)
        if dialect.name != "sqlite":
            return (await self._run(session, statement, rows, own)).all()
        if self._reading is None:
            self._reading = _Reading(statement, dialect)
        found = await self._run(session, self._reading.statement, rows, own)
        return self._reading.rows_of(found.scalar_one())

    async def lock(self, session: AsyncSession, rows: Iterable[Row], **own: Any) -> None:
        """Lock the rows that a select `with_for_update` finds, in its order, until the end of the transaction.

        On SQLite this does nothing: a writer locks the whole database.
        """
        dialect = session.get_bind().dialect
        if dialect.name != "sqlite":
            await self._run(session, self._statement(dialect), rows, own)

    def _statement(self, dialect: Dialect) -> Any:
        statement = self._statements.get(dialect.name)
        if statement is None:
            given = _read(
                dialect, self._columns, bindparam("rows", type_=String), bindparam("num_rows", type_=BigInteger)
            )
            statement = self._statements[dialect.name] = self._build(given, dialect)
        return statement

    async def _run(
        self, session: AsyncSession, statement: Any, rows: Iterable[Row], own: Mapping[str, Any]
    ) -> CursorResult[Any]:
        connection = await session.connection()
        given = list(rows)
        values = {"rows": _document(connection.dialect, self._columns, given), **own}
        if connection.dialect.name == "postgresql":
            values["num_rows"] = len(given)
        found: CursorResult[Any] = await connection.execute(statement, values)
        return found


class _Reading:
    """Select whose result is a single JSON document, and the conversion back to rows."""

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
    """Return an expression for bytes as hex text; null stays null."""
    return case((column.is_not(None), func.hex(column)))


def _of_hex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def _result_of(column: ColumnElement[Any], dialect: Dialect) -> Callable[[Any], Any] | None:
    """Return the driver's conversion for a result value of the column; None if there is none."""
    return column.type.dialect_impl(dialect).result_processor(dialect, None)


class BulkInsert(BulkStatement):
    """Insert of rows into one table. `finish` adds other clauses, without parameters, to the dialect's insert."""

    def __init__(self, model: type[Base], finish: Callable[[Any], Any] = lambda insert: insert) -> None:
        table = model.__table__
        assert isinstance(table, Table)
        columns = list(table.columns)

        def build(given: Select[Any], dialect: Dialect) -> Any:
            insert = insert_of(dialect, table).from_select(columns, given)
            return finish(insert).execution_options(preserve_rowcount=True)

        super().__init__(columns, build)

    async def __call__(self, session: AsyncSession, rows: Sequence[Row]) -> int:
        """Insert the rows, given as values of all columns in table order; return how many were inserted or changed."""
        return (await self.execute(session, rows)).rowcount if rows else 0


class BulkAdd(BulkStatement):
    """Addition to a column of the rows of one table, selected by the values of `keys`.

    It locks the rows in no defined order: the caller must have locked them, or rows that guard them.
    """

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
        """Add the amounts to the rows by key. Keys without a row are ignored."""
        if amounts:
            await self.execute(session, [(*key, amount) for key, amount in amounts.items()])


def in_rows(session: AsyncSession, columns: Sequence[Any], rows: Iterable[Row]) -> ColumnElement[bool]:
    """Return a condition that the columns equal one of the rows, for a statement that runs rarely. Rows hold no bytes.

    SQLite looks the rows up in an index this way; it would compare rows written into the statement itself with every
    row of the table.
    """
    dialect, found = session.get_bind().dialect, [column.expression for column in columns]
    given = list(rows)
    document = bindparam(None, _document(dialect, found, given), String)
    return tuple_(*columns).in_(_read(dialect, found, document, bindparam(None, len(given), BigInteger)))


def _read(
    dialect: Dialect, columns: _Columns, document: ColumnElement[str], num_rows: ColumnElement[int]
) -> Select[Any]:
    """Return a select that unpacks the JSON document into rows.

    PostgreSQL is told their number, because it assumes 100 rows otherwise, and would read a whole table of some ten
    thousand rows to find a few in it.
    """
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
    found = select(*named).where(true())  # without WHERE, SQLite would parse an insert's ON as a join's
    return found.limit(num_rows) if dialect.name == "postgresql" else found


def _document(dialect: Dialect, columns: _Columns, rows: Sequence[Row]) -> str:
    """Encode the rows as JSON, with values converted to the database's own types where JSON has none."""
    by_column = list(zip(*rows, strict=True)) or [()] * len(columns)
    for place, column in enumerate(columns):
        bind = column.type.dialect_impl(dialect).bind_processor(dialect)
        if bind is not None:
            by_column[place] = tuple(map(bind, by_column[place]))
    return msgspec.json.encode(list(zip(*by_column, strict=True))).decode()

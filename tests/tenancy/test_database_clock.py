"""The clock of the tests is read at execution, also beside statements of the same shape in the statement cache."""

from __future__ import annotations

from sqlalchemy import BigInteger, literal, select
from tests.database_clock import DatabaseClock

from moiety_platform.db.session import Database


async def test_a_cached_statement_of_a_literal_is_not_taken_for_the_clock(database: Database) -> None:
    first, second = DatabaseClock(), DatabaseClock()
    second.advance(60)
    async with database.read() as session:
        assert await session.scalar(select(literal(5, BigInteger))) == 5
        assert await session.scalar(select(first.now())) == first.ms
        assert await session.scalar(select(second.now())) == second.ms
        assert await session.scalar(select(second.now() - 5)) == second.ms - 5
        assert await session.scalar(select(literal(7, BigInteger))) == 7


async def test_a_statement_reads_the_clock_when_it_is_executed(database: Database, time: DatabaseClock) -> None:
    statement = select(time.now())
    async with database.read() as session:
        assert await session.scalar(statement) == time.ms
        time.advance(30)
        assert await session.scalar(statement) == time.ms

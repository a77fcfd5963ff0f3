"""Statements that SQL leaves to each database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Dialect, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import Base


def insert_into(session: AsyncSession, table: type[Base]) -> Any:
    """An insert in the database's own dialect, which knows what to do on a conflict."""
    return insert_of(session.get_bind().dialect, table)


def insert_of(dialect: Dialect, table: type[Base] | Table) -> Any:
    """The same, of a dialect."""
    return (postgresql if dialect.name == "postgresql" else sqlite).insert(table)

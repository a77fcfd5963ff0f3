"""Statements that differ between databases."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Dialect, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import Base


def insert_into(session: AsyncSession, table: type[Base]) -> Any:
    """Return an insert in the session's dialect, which supports ON CONFLICT."""
    return insert_of(session.get_bind().dialect, table)


def insert_of(dialect: Dialect, table: type[Base] | Table) -> Any:
    """Return an insert of the given dialect, which supports ON CONFLICT."""
    return (postgresql if dialect.name == "postgresql" else sqlite).insert(table)

"""An insert that knows what to do on a conflict; each database spells it in its own dialect, with the same words."""

from __future__ import annotations

from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import Base


def insert_into(session: AsyncSession, table: type[Base]) -> Any:
    """An insert with `on_conflict_do_nothing` and `on_conflict_do_update`."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    return dialect.insert(table)

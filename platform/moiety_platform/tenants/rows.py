"""Look-up of rows by ids that clients send."""

from __future__ import annotations

from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import Base
from moiety_platform.errors import NotFound
from moiety_platform.resources.declaration import Resource
from moiety_platform.tenants.checks import is_id

Row = TypeVar("Row", bound=Base)


async def require_row(
    session: AsyncSession, table: type[Row], row_id: str, resource: Resource, *, locks: bool = False
) -> Row:
    """Return the row of a resource; if `locks`, as it is now and locked until the transaction ends. Raises NotFound."""
    row = await session.get(table, row_id, with_for_update=locks, populate_existing=locks) if is_id(row_id) else None
    if row is None:
        name, collection = resource.name, resource.collection
        message = f"There is no {name} with this id; list them with GET /admin/v1/{collection}."
        raise NotFound(message, param=f"{name}_id")
    return row

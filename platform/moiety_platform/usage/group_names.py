"""Names of the tenants, projects and keys in the groups of a report. Within the caller's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.tenants.models import ApiKey, Project, Tenant

_NAMED: dict[str, Any] = {"tenant": Tenant, "project": Project, "key": ApiKey}


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the tenants, projects and keys in a report, by id."""

    by_id: dict[str, str]

    def label_all(self, grouping: Sequence[str], row: Sequence[Any]) -> dict[str, str | None]:
        """Return the group of a row, whose first columns are the group's values."""
        return dict(part for name, value in zip(grouping, row, strict=False) for part in self._label(name, value))

    def _label(self, grouping: str, value: str) -> list[tuple[str, str | None]]:
        if grouping in _NAMED:
            return [(f"{grouping}_id", value), (f"{grouping}_name", self.by_id.get(value))]
        return [(grouping, value)]


async def find_names(session: AsyncSession, grouping: Sequence[str], rows: Sequence[Any]) -> Names:
    """Return the names of the ids in the rows, whose first columns are the groups."""
    by_id: dict[str, str] = {}
    for index, name in enumerate(grouping):
        if name in _NAMED and rows:
            model = _NAMED[name]
            ids = {row[index] for row in rows}
            found = await session.execute(select(model.id, model.name).where(model.id.in_(ids)))
            by_id.update((row_id, row_name) for row_id, row_name in found)
    return Names(by_id)

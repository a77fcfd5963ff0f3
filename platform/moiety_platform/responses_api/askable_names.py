"""Names by which a key may ask for models: its models, routes to them, and adapters of them.

Stored responses and conversations have the name by which their requests asked. A key that may ask by a name sees what
was stored under it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, or_, true
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from moiety_platform.auth.principal import Principal
from moiety_platform.model_routes.service import load_routes


@dataclass(frozen=True, slots=True)
class AskableNames:
    """Names by which a key may ask; None: all."""

    names: frozenset[str] | None

    def has(self, name: str) -> bool:
        """Return whether the key may ask by that name, or by the name of the model before an adapter's."""
        return self.names is None or name in self.names or name.rpartition(":")[0] in self.names

    def condition(self, column: InstrumentedAttribute[Any]) -> ColumnElement[bool]:
        """Return the condition that a column has one of the names."""
        if self.names is None:
            return true()
        adapted = [column.startswith(f"{name}:", autoescape=True) for name in sorted(self.names)]
        return or_(column.in_(sorted(self.names)), *adapted)


async def askable_names(session: AsyncSession, whose: Principal) -> AskableNames:
    """Return the names by which a key may ask. A key may ask by a route if it may use one of the route's models."""
    allowed = whose.allowed_models
    if allowed is None:
        return AskableNames(None)
    routes = await load_routes(session)
    return AskableNames(allowed | {name for name, route in routes.items() if not allowed.isdisjoint(route.models())})

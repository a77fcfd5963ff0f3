"""Cached snapshot of the adapters, for the requests of one gateway process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.adapters.schemas import served_name
from moiety_platform.adapters.service import list_adapters
from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.db.snapshot import TTL_S, Snapshot


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """One usable adapter. `model` is its base model, `engine_name` its name on the engines."""

    served_as: str
    model: str
    engine_name: str
    created_unix_s: int


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """All adapters at one moment, by tenant and by the name that clients use."""

    of_tenant: Mapping[str, Mapping[str, NamedAdapter]] = field(default_factory=dict)

    def find(self, tenant_id: str, served_as: str) -> NamedAdapter | None:
        return self.of_tenant.get(tenant_id, {}).get(served_as)


class AdapterCache(Snapshot[AdapterNames]):
    """Snapshot of the adapters that expires after `ttl_s` seconds. Owned by the entry point; for one event loop."""

    def __init__(self, database: Database, clock: Clock, *, ttl_s: float = TTL_S) -> None:
        super().__init__("adapters", load_names, database, clock, ttl_s=ttl_s)

    async def find(self, tenant_id: str, model: str) -> NamedAdapter | None:
        """Return the tenant's adapter that clients call `model`, or None. A name without `:` costs no lookup.

        Raises Unavailable.
        """
        return (await self.current()).find(tenant_id, model) if ":" in model else None

    async def all_of(self, tenant_id: str) -> Mapping[str, NamedAdapter]:
        """Return the tenant's adapters by the names that clients use. Raises Unavailable."""
        return (await self.current()).of_tenant.get(tenant_id, {})


async def load_names(session: AsyncSession) -> AdapterNames:
    """Load all adapters that are ready for use."""
    found: dict[str, dict[str, NamedAdapter]] = {}
    for one in await list_adapters(session, ready=True):
        name = served_name(one.model, one.name)
        named = NamedAdapter(name, one.model, one.engine_adapter or one.id, one.created_ms // 1000)
        found.setdefault(one.tenant_id, {})[name] = named
    return AdapterNames(found)

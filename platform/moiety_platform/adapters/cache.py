"""Which adapters there are, as the requests of one gateway process see them."""

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
    """`model` is the one that it is for, `engine_name` what engines know it by."""

    served_as: str
    model: str
    engine_name: str
    created_unix_s: int


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """All adapters at one moment, by tenant and the name that clients use."""

    of_tenant: Mapping[str, Mapping[str, NamedAdapter]] = field(default_factory=dict)

    def find(self, tenant_id: str, served_as: str) -> NamedAdapter | None:
        return self.of_tenant.get(tenant_id, {}).get(served_as)


class AdapterCache(Snapshot[AdapterNames]):
    """Owned by the entry point; one event loop."""

    def __init__(self, database: Database, clock: Clock, *, ttl_s: float = TTL_S) -> None:
        super().__init__("adapters", load_names, database, clock, ttl_s=ttl_s)

    async def find(self, tenant_id: str, model: str) -> NamedAdapter | None:
        """The tenant's adapter that a client calls so; None where that is none, and costs nothing then if no adapter
        could be called so. Raises Unavailable."""
        return (await self.current()).find(tenant_id, model) if ":" in model else None

    async def all_of(self, tenant_id: str) -> Mapping[str, NamedAdapter]:
        """The tenant's own, by the names that clients use. Raises Unavailable."""
        return (await self.current()).of_tenant.get(tenant_id, {})


async def load_names(session: AsyncSession) -> AdapterNames:
    """All that can be used."""
    found: dict[str, dict[str, NamedAdapter]] = {}
    for one in await list_adapters(session, ready=True):
        name = served_name(one.model, one.name)
        named = NamedAdapter(name, one.model, one.engine_adapter or one.id, one.created_ms // 1000)
        found.setdefault(one.tenant_id, {})[name] = named
    return AdapterNames(found)

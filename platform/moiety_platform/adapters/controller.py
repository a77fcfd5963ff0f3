"""`/admin/v1/adapters`: LoRA adapters of tenants. The admin router authenticates."""

from __future__ import annotations

from litestar import Controller, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.access.caller import Caller
from moiety_platform.adapters import service
from moiety_platform.adapters.admin_resource import ADAPTERS, GRANT_ADAPTERS
from moiety_platform.adapters.cache import AdapterCache
from moiety_platform.adapters.contents import AdapterContents
from moiety_platform.adapters.schemas import AdapterPartBody, AdapterView, AdapterViews, NewAdapter
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.db.session import Database
from moiety_platform.errors import Conflict, NotFound
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.openapi.described import fails


class AdapterStorage:
    """Largest size of one adapter and of all adapters of a tenant, in bytes.

    A change applies to the parts received afterwards.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int) -> None:
        self.max_bytes, self.max_tenant_bytes = max_bytes, max_tenant_bytes


AdapterCacheDependency = NamedDependency[SkipValidation[AdapterCache]]


class AdapterController(Controller):
    """Routes of adapters."""

    path = ADAPTERS.path
    tags = ADAPTERS.tags

    @post(opt=needs(ADAPTERS.write) | fails(404, 409))
    async def create_adapter(
        self,
        store: NamedDependency[AuditedStore],
        adapter_cache: AdapterCacheDependency,
        caller: NamedDependency[SkipValidation[Caller]],
        data: JSONBody[NewAdapter],
    ) -> AdapterView:
        """Begin an upload; its parts follow. With `engine_adapter`, which requires an operator, nothing is uploaded."""
        if data.engine_adapter is not None:
            caller.require(GRANT_ADAPTERS)
        async with store.write() as session:
            view = AdapterView.of(await service.create_adapter(session, data))
        adapter_cache.forget()
        return view

    @post("/{adapter_id:str}/parts", status_code=200, opt=needs(ADAPTERS.write) | fails(404, 409, 413))
    async def add_adapter_part(
        self,
        database: NamedDependency[Database],
        adapter_storage: NamedDependency[AdapterStorage],
        adapter_id: FromPath[str],
        data: JSONBody[AdapterPartBody],
    ) -> AdapterView:
        """Append the next part of the tensors."""
        async with database.write() as session:
            limits = {"max_bytes": adapter_storage.max_bytes, "max_tenant_bytes": adapter_storage.max_tenant_bytes}
            return AdapterView.of(await service.append_part(session, adapter_id, data.start, data.data, **limits))

    @post("/{adapter_id:str}/publish", status_code=200, opt=needs(ADAPTERS.write) | fails(404, 409, 507))
    async def publish_adapter(
        self,
        database: NamedDependency[Database],
        store: NamedDependency[AuditedStore],
        adapter_cache: AdapterCacheDependency,
        objects: NamedDependency[SkipValidation[ObjectStore]],
        adapter_id: FromPath[str],
    ) -> AdapterView:
        """Complete an upload: the tenant can use the adapter at every gateway within seconds."""
        async with database.read() as session:
            adapter = await service.get_adapter(session, adapter_id)
        contents = AdapterContents(database, objects)
        written, key = await contents.store(adapter)
        try:
            async with store.write() as session:
                found = await service.publish_adapter(session, adapter_id, adapter.num_bytes, written.digest, key)
                view = AdapterView.of(found)
        except (Conflict, NotFound):
            await contents.discard(adapter_id, key)
            raise
        adapter_cache.forget()
        return view

    @get(opt=needs(ADAPTERS.read))
    async def list_adapters(
        self, database: NamedDependency[Database], tenant_id: FromQuery[str | None] = None
    ) -> AdapterViews:
        """List adapters by tenant, model and name."""
        async with database.read() as session:
            return AdapterViews([AdapterView.of(one) for one in await service.list_adapters(session, tenant_id)])

    @get("/{adapter_id:str}", opt=needs(ADAPTERS.read))
    async def get_adapter(self, database: NamedDependency[Database], adapter_id: FromPath[str]) -> AdapterView:
        """Return one adapter."""
        async with database.read() as session:
            return AdapterView.of(await service.get_adapter(session, adapter_id))

    @delete("/{adapter_id:str}", status_code=200, opt=needs(ADAPTERS.write))
    async def delete_adapter(
        self,
        store: NamedDependency[AuditedStore],
        adapter_cache: AdapterCacheDependency,
        adapter_id: FromPath[str],
    ) -> AdapterView:
        """Delete an adapter; requests cannot use it any more. Returns its last state."""
        async with store.write() as session:
            view = AdapterView.of(await service.get_adapter(session, adapter_id))
            await service.delete_adapter(session, adapter_id)
        adapter_cache.forget()
        return view

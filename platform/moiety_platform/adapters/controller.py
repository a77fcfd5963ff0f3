"""`/admin/v1/adapters`: LoRA adapters of tenants. The admin router authenticates."""

from __future__ import annotations

from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody, SkipValidation

from moiety_platform.access.caller import Caller
from moiety_platform.access.table import AdminAction, needs
from moiety_platform.adapters import service
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


def adapter_routes(cache: AdapterCache, room: AdapterStorage, objects: ObjectStore) -> list[HTTPRouteHandler]:
    """Return the handlers, for the admin router to register."""

    @post(
        "/adapters", tags=["adapters"], name="create_adapter", opt=needs(AdminAction.WRITE_ADAPTERS) | fails(404, 409)
    )
    async def create_adapter(
        store: NamedDependency[AuditedStore],
        caller: NamedDependency[SkipValidation[Caller]],
        data: JSONBody[NewAdapter],
    ) -> AdapterView:
        """Begin an upload; its parts follow. With `engine_adapter`, which requires an operator, nothing is uploaded."""
        if data.engine_adapter is not None:
            caller.require(AdminAction.GRANT_ADAPTERS)
        async with store.write() as session:
            view = AdapterView.of(await service.create_adapter(session, data))
        cache.forget()
        return view

    @post(
        "/adapters/{adapter_id:str}/parts",
        status_code=200,
        tags=["adapters"],
        name="add_adapter_part",
        opt=needs(AdminAction.WRITE_ADAPTERS) | fails(404, 409, 413),
    )
    async def add_adapter_part(
        database: NamedDependency[Database], adapter_id: FromPath[str], data: JSONBody[AdapterPartBody]
    ) -> AdapterView:
        """Append the next part of the tensors."""
        async with database.write() as session:
            limits = {"max_bytes": room.max_bytes, "max_tenant_bytes": room.max_tenant_bytes}
            return AdapterView.of(await service.append_part(session, adapter_id, data.start, data.data, **limits))

    @post(
        "/adapters/{adapter_id:str}/publish",
        status_code=200,
        tags=["adapters"],
        name="publish_adapter",
        opt=needs(AdminAction.WRITE_ADAPTERS) | fails(404, 409, 507),
    )
    async def publish_adapter(
        database: NamedDependency[Database], store: NamedDependency[AuditedStore], adapter_id: FromPath[str]
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
        cache.forget()
        return view

    @get("/adapters", tags=["adapters"], name="list_adapters", opt=needs(AdminAction.READ_ADAPTERS))
    async def list_adapters(
        database: NamedDependency[Database], tenant_id: FromQuery[str | None] = None
    ) -> AdapterViews:
        """List adapters by tenant, model and name."""
        async with database.read() as session:
            return AdapterViews([AdapterView.of(one) for one in await service.list_adapters(session, tenant_id)])

    @get("/adapters/{adapter_id:str}", tags=["adapters"], name="get_adapter", opt=needs(AdminAction.READ_ADAPTERS))
    async def get_adapter(database: NamedDependency[Database], adapter_id: FromPath[str]) -> AdapterView:
        """Return one adapter."""
        async with database.read() as session:
            return AdapterView.of(await service.get_adapter(session, adapter_id))

    @delete(
        "/adapters/{adapter_id:str}",
        status_code=200,
        tags=["adapters"],
        name="delete_adapter",
        opt=needs(AdminAction.WRITE_ADAPTERS),
    )
    async def delete_adapter(store: NamedDependency[AuditedStore], adapter_id: FromPath[str]) -> AdapterView:
        """Delete an adapter, so that nobody can use it any more; returns its last state."""
        async with store.write() as session:
            view = AdapterView.of(await service.get_adapter(session, adapter_id))
            await service.delete_adapter(session, adapter_id)
        cache.forget()
        return view

    return [create_adapter, add_adapter_part, publish_adapter, list_adapters, get_adapter, delete_adapter]

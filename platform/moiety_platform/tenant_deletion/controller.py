"""`/admin/v1/tenants/{id}/data`: deletes a tenant's data. The admin router authenticates."""

from __future__ import annotations

from collections.abc import Callable

from litestar import Response, delete
from litestar.di import NamedDependency
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from moiety_platform.access.table import AdminAction, needs
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.db.session import Database
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.openapi.described import JSON, Described, describes
from moiety_platform.tenant_deletion.schemas import TenantDeletionView
from moiety_platform.tenant_deletion.service import TenantDeleter

BUDGET_S = 10.0

_ANSWERS = describes(Described(answers={200: {JSON: TenantDeletionView}, 202: {JSON: TenantDeletionView}}))


def tenant_deletion_routes(
    objects: ObjectStore,
    budget_s: float = BUDGET_S,
    traces: Database | None = None,
    on_begun: Callable[[], None] = lambda: None,
) -> list[HTTPRouteHandler]:
    """Return the handlers, for the admin router to register.

    `traces` is the trace store, if it is another database; `on_begun` is called once a deletion is recorded.
    """

    @delete(
        "/tenants/{tenant_id:str}/data",
        status_code=200,
        tags=["tenants"],
        name="erase_tenant_data",
        opt=needs(AdminAction.ERASE_TENANTS) | _ANSWERS,
    )
    async def erase_tenant_data(
        store: NamedDependency[AuditedStore], authenticator: NamedDependency[Authenticator], tenant_id: FromPath[str]
    ) -> Response[TenantDeletionView]:
        """Revoke a tenant's keys and erase its content and names for good; its usage is kept as numbers.

        While more remains the response is 202: repeat the request until it is 200.
        """
        eraser = TenantDeleter(store, tenant_id, objects, traces)
        for key_id in await eraser.begin():
            authenticator.forget(key_id)
        on_begun()
        view = TenantDeletionView.of(await eraser.work(budget_s))
        return Response(view, status_code=202 if view.ended_at is None else 200)

    return [erase_tenant_data]

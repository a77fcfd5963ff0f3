"""`/admin/v1/tenants/{id}/data`: deletes a tenant's data. The admin router authenticates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from litestar import Controller, Response, delete
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.db.session import Database
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.openapi.described import JSON, Described, describes
from moiety_platform.tenant_deletion.schemas import TenantDeletionView
from moiety_platform.tenant_deletion.service import TenantDeleter
from moiety_platform.tenants.admin_resource import ERASE_TENANTS

BUDGET_S = 10.0

_ANSWERS = describes(Described(answers={200: {JSON: TenantDeletionView}, 202: {JSON: TenantDeletionView}}))


@dataclass(frozen=True, slots=True)
class DeletionServices:
    """Services of a deletion.

    `objects` has contents of the tenant's files and adapters; `traces` is the trace store, if it is another database;
    `on_begun` is called once a deletion is recorded.
    """

    objects: ObjectStore
    traces: Database | None = None
    on_begun: Callable[[], None] = lambda: None


class TenantDeletionController(Controller):
    """Route of a tenant's data."""

    path = "/tenants/{tenant_id:str}/data"
    tags = ("tenants",)

    @delete(status_code=200, opt=needs(ERASE_TENANTS) | _ANSWERS)
    async def erase_tenant_data(
        self,
        store: NamedDependency[AuditedStore],
        authenticator: NamedDependency[Authenticator],
        deletion: NamedDependency[SkipValidation[DeletionServices]],
        tenant_id: FromPath[str],
    ) -> Response[TenantDeletionView]:
        """Revoke a tenant's keys and erase its content and names for good; its usage is kept as numbers.

        While more remains the response is 202: repeat the request until it is 200.
        """
        eraser = TenantDeleter(store, tenant_id, deletion.objects, deletion.traces)
        for key_id in await eraser.begin():
            authenticator.forget(key_id)
        deletion.on_begun()
        view = TenantDeletionView.of(await eraser.work(BUDGET_S))
        return Response(view, status_code=202 if view.ended_at is None else 200)

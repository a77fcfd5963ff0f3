"""/admin/v1/tenants/{tenant_id}/idempotency: deletion of a tenant's stored answers."""

from __future__ import annotations

import msgspec
from litestar import Controller, delete
from litestar.di import NamedDependency
from litestar.params import FromPath

from moiety_platform.access.actions import needs
from moiety_platform.access.views import DELETE_STORED_ANSWERS
from moiety_platform.audit.trail import AuditedStore, Change, note
from moiety_platform.idempotency.models import IdempotentRequest
from moiety_platform.idempotency.store import KeyStore
from moiety_platform.tenants.service import get_tenant


class DeletedAnswers(msgspec.Struct, frozen=True):
    """Number of deleted keys and answers."""

    num_keys: int


class IdempotencyController(Controller):
    """Answers stored for requests with an `Idempotency-Key`."""

    path = "/tenants/{tenant_id:str}/idempotency"
    tags = ("tenants",)

    @delete(status_code=200, opt=needs(DELETE_STORED_ANSWERS))
    async def delete_stored_answers(
        self, store: NamedDependency[AuditedStore], tenant_id: FromPath[str]
    ) -> DeletedAnswers:
        """Delete all answers stored for a tenant's Idempotency-Keys before they expire.

        A repeated key is served again.
        """
        async with store.write() as session:
            tenant = await get_tenant(session, tenant_id)
            num_keys = await KeyStore().erase(session, tenant.id)
            what = {"tenant_id": tenant.id, "num_keys": num_keys}
            note(session, Change("delete", IdempotentRequest.__tablename__, tenant.id, what, None))
        return DeletedAnswers(num_keys)

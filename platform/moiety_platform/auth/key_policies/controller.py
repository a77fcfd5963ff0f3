"""`/admin/v1/key-policies`: maps HTTP to the service. The admin router decides on access."""

from __future__ import annotations

from litestar import Controller, Response, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody

from moiety_platform.access.actions import needs
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.key_policies import service
from moiety_platform.auth.key_policies.admin_resource import KEY_POLICIES
from moiety_platform.auth.key_policies.schemas import KeyPolicyPage, KeyPolicyView, NewKeyPolicy
from moiety_platform.db.paging import PageRequestDependency
from moiety_platform.db.session import Database
from moiety_platform.etags import Precondition, tagged
from moiety_platform.openapi.described import fails


class KeyPolicyController(Controller):
    """Routes of key policies."""

    path = KEY_POLICIES.path
    tags = KEY_POLICIES.tags

    @get(opt=needs(KEY_POLICIES.read) | fails(404))
    async def list_key_policies(
        self,
        database: NamedDependency[Database],
        page: PageRequestDependency,
        tenant_id: FromQuery[str | None] = None,
    ) -> KeyPolicyPage:
        """List the policies of tenants."""
        async with database.read() as session:
            return await service.list_policies(session, page, tenant_id)

    @get("/{tenant_id:str}", opt=needs(KEY_POLICIES.read))
    async def get_key_policy(
        self, database: NamedDependency[Database], tenant_id: FromPath[str]
    ) -> Response[KeyPolicyView]:
        """Return the policy of one tenant."""
        async with database.read() as session:
            return tagged(KeyPolicyView.of(await service.get_policy(session, tenant_id)))

    @put(opt=needs(KEY_POLICIES.write) | fails(404, 409))
    async def set_key_policy(
        self,
        store: NamedDependency[AuditedStore],
        precondition: NamedDependency[Precondition],
        data: JSONBody[NewKeyPolicy],
    ) -> Response[KeyPolicyView]:
        """Set or replace the policy of a tenant for keys that its developers make."""
        async with store.write() as session:
            found = await service.find_policy(session, data.tenant_id)
            precondition.check(None if found is None else KeyPolicyView.of(found))
            return tagged(KeyPolicyView.of(await service.set_policy(session, data)))

    @delete("/{tenant_id:str}", status_code=200, opt=needs(KEY_POLICIES.write))
    async def delete_key_policy(
        self,
        store: NamedDependency[AuditedStore],
        precondition: NamedDependency[Precondition],
        tenant_id: FromPath[str],
    ) -> KeyPolicyView:
        """Delete a policy: developers make no keys any more. Returns its last state."""
        async with store.write() as session:
            precondition.check(KeyPolicyView.of(await service.get_policy(session, tenant_id)))
            return await service.delete_policy(session, tenant_id)

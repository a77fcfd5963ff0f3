"""Endpoints of /admin/v1/quotas. Maps HTTP to the service; the router authorizes the caller."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from litestar import Controller, Response, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody, SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.access.caller import Caller
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.db.paging import Limit, PageRequestDependency, parse_page
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.etags import Precondition, tagged
from moiety_platform.openapi.described import fails
from moiety_platform.query_parameters import one_of
from moiety_platform.quota import service
from moiety_platform.quota.admin_resource import QUOTAS, WRITE_TENANT_QUOTAS
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.kinds import LimitLevel, Scope
from moiety_platform.quota.lease_views import LeaseList, list_leases
from moiety_platform.quota.models import LeaseState
from moiety_platform.quota.schemas import NewQuota, QuotaPage, QuotaView

LeaseStateFilter = Annotated[str | None, one_of("Only leases in this state; live if not given.", *LeaseState)]


QuotaEnforcerDependency = NamedDependency[SkipValidation[QuotaEnforcer]]


class QuotaController(Controller):
    """Limits of tenants, projects and keys. A request must fit under all limits that apply to it."""

    path = QUOTAS.path
    tags = QUOTAS.tags

    @put(opt=needs(QUOTAS.write) | fails(404))
    async def set_quota(
        self,
        store: NamedDependency[AuditedStore],
        quotas: QuotaEnforcerDependency,
        caller: NamedDependency[Caller],
        precondition: NamedDependency[Precondition],
        data: JSONBody[NewQuota],
    ) -> Response[QuotaView]:
        """Set a limit, or change its cap; it takes effect here at the next request, in others within seconds."""
        _check_may_change(caller, data.level)
        async with store.write() as session:
            precondition.check(await service.find_quota(session, data, store.clock.now()))
            view = await service.set_quota(session, data, store.clock.now())
        quotas.forget(Scope(LimitLevel(view.level), view.scope_id))
        return tagged(view)

    @get(opt=needs(QUOTAS.read))
    async def list_quotas(
        self,
        database: NamedDependency[Database],
        now: NamedDependency[datetime],
        page: PageRequestDependency,
        scope_id: FromQuery[str | None] = None,
        tenant_id: FromQuery[str | None] = None,
    ) -> QuotaPage:
        """List limits, oldest first; with `scope_id`, those of one tenant, project or key.

        With `tenant_id`, those of a tenant and of its projects and keys.
        """
        async with database.read() as session:
            return await service.list_quotas(session, page, now, scope_id=scope_id, tenant_id=tenant_id)

    @get("/leases", opt=needs(QUOTAS.read))
    async def list_leases(
        self, database: NamedDependency[Database], limit: Limit = None, lease_state: LeaseStateFilter = None
    ) -> LeaseList:
        """List the leases of gateways; live ones, unless `lease_state` selects others."""
        if lease_state is not None and lease_state not in frozenset(LeaseState):
            raise BadRequest(f"'lease_state' must be one of: {', '.join(LeaseState)}.", param="lease_state")
        wanted = LeaseState.LIVE if lease_state is None else LeaseState(lease_state)
        async with database.read() as session:
            return await list_leases(session, wanted, parse_page(limit, None).limit)

    @get("/{quota_id:str}", opt=needs(QUOTAS.read))
    async def get_quota(
        self,
        database: NamedDependency[Database],
        now: NamedDependency[datetime],
        quota_id: FromPath[str],
    ) -> Response[QuotaView]:
        """Return one limit, and its use in the current window."""
        async with database.read() as session:
            return tagged(await service.get_quota(session, quota_id, now))

    @delete("/{quota_id:str}", status_code=200, opt=needs(QUOTAS.write))
    async def delete_quota(
        self,
        store: NamedDependency[AuditedStore],
        quotas: QuotaEnforcerDependency,
        caller: NamedDependency[Caller],
        precondition: NamedDependency[Precondition],
        quota_id: FromPath[str],
    ) -> QuotaView:
        """Delete a limit; returns its last state."""
        async with store.write() as session:
            current = await service.get_quota(session, quota_id, store.clock.now())
            _check_may_change(caller, LimitLevel(current.level))
            precondition.check(current)
            view = await service.delete_quota(session, quota_id, store.clock.now())
        quotas.forget(Scope(LimitLevel(view.level), view.scope_id))
        return view


def _check_may_change(caller: Caller, level: LimitLevel) -> None:
    """Raise Forbidden if a tenant's administrator would change a limit of the whole tenant."""
    if level is LimitLevel.TENANT:
        caller.require(WRITE_TENANT_QUOTAS)

"""`/admin/v1/overview`, the state of the deployment as recorded in the store; and `/admin/v1/caller`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import SkipValidation
from sqlalchemy import func, or_, select

from moiety_platform.access.actions import AdminAction, needs
from moiety_platform.access.caller import Caller
from moiety_platform.access.views import READ_CALLER, READ_OVERVIEW, READ_OWN, WRITE_OWN_KEYS
from moiety_platform.auth.users.models import UserState
from moiety_platform.auth.users.sign_in import Membership
from moiety_platform.db.session import Database
from moiety_platform.tenants.models import ApiKey, Project, Tenant, TenantStatus
from moiety_platform.usage.queries import UsageFilter, sum_usage
from moiety_platform.usage.reconciliation import take_snapshot_locks
from moiety_platform.usage.schemas import UsageTotals


class Overview(msgspec.Struct, frozen=True):
    """Counts, and sums over the last hour and the last 24 hours."""

    as_of: datetime
    tenants_active: int
    tenants_suspended: int
    projects: int
    keys_active: int
    keys_total: int
    last_hour: UsageTotals
    last_24_hours: UsageTotals


class CallerRole(msgspec.Struct, frozen=True):
    """A role of a user, in one tenant or in the whole deployment. The header `X-Moiety-Tenant` selects the tenant."""

    role: str
    tenant_id: str | None
    tenant_name: str | None


class CallerView(msgspec.Struct, frozen=True):
    """The calling administrator or user.

    `actor` is its name in the audit log; `tenant_id` is null for the whole deployment; `may` are the actions that its
    role allows. `user_id` is null for a key, and for a token whose role is in its claims. `roles` are all of a user.
    """

    actor: str
    role: str
    tenant_id: str | None
    may: list[str]
    user_id: str | None
    roles: list[CallerRole]


class CallerController(Controller):
    """Route of the calling administrator."""

    path = "/caller"
    tags = ("overview",)

    @get(opt=needs(READ_CALLER))
    async def get_caller(
        self,
        caller: NamedDependency[Caller],
        actions: NamedDependency[SkipValidation[Sequence[AdminAction]]],
        memberships: NamedDependency[SkipValidation[Sequence[Membership]]],
    ) -> CallerView:
        """Return your name in the audit log, your role, the actions that it allows, and your roles elsewhere."""
        of_users = () if caller.user_id is not None else (READ_OWN, WRITE_OWN_KEYS)
        may = sorted(action.name for action in actions if caller.may(action) and action not in of_users)
        roles = [
            CallerRole(one.user.role, one.user.tenant_id, one.tenant_name)
            for one in memberships
            if one.user.state == UserState.ACTIVE
        ]
        return CallerView(caller.actor, caller.role.value, caller.tenant_id, may, caller.user_id, roles)


class OverviewController(Controller):
    """Route of the overview."""

    path = "/overview"
    tags = ("overview",)

    @get(opt=needs(READ_OVERVIEW))
    async def get_overview(self, database: NamedDependency[Database], now: NamedDependency[datetime]) -> Overview:
        """Return the state of the deployment at a glance."""
        active = Tenant.status == TenantStatus.ACTIVE
        working = ApiKey.revoked_at.is_(None) & or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now)
        counts = select(
            select(func.count()).select_from(Tenant).where(active).scalar_subquery(),
            select(func.count()).select_from(Tenant).where(~active).scalar_subquery(),
            select(func.count()).select_from(Project).scalar_subquery(),
            select(func.count()).select_from(ApiKey).where(working).scalar_subquery(),
            select(func.count()).select_from(ApiKey).scalar_subquery(),
        )
        until = now + timedelta(seconds=1)
        async with database.read() as session:
            await take_snapshot_locks(session)
            found = (await session.execute(counts)).one()
            last_hour = await sum_usage(session, UsageFilter(now - timedelta(hours=1), until), ())
            last_day = await sum_usage(session, UsageFilter(now - timedelta(days=1), until), ())
        return Overview(now, *found, last_hour.data[0].totals, last_day.data[0].totals)

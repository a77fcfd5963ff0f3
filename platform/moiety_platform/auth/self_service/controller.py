"""`/admin/v1/me`: what a user who signs in sees and makes for itself. The admin router decides on access.

A caller reaches its own tenant's rows only; within them, every route is restricted to the user's projects and keys.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated

from litestar import Controller, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.access.actions import needs
from moiety_platform.access.caller import MISSING_ROLE, Caller
from moiety_platform.access.views import READ_OWN, WRITE_OWN_KEYS
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.key_details import month_start
from moiety_platform.auth.key_policies.schemas import KeyPolicyView
from moiety_platform.auth.key_policies.service import find_policy
from moiety_platform.auth.pepper import Pepper
from moiety_platform.auth.schemas import CreatedKey, KeyPage, KeyView, Rotation
from moiety_platform.auth.self_service import service
from moiety_platform.auth.self_service.schemas import NewOwnKey, OwnProject, OwnProjects, SelfView
from moiety_platform.auth.service import KeyFilter, list_keys
from moiety_platform.auth.users.models import User
from moiety_platform.db.paging import MAX_LIMIT, PageRequest, PageRequestDependency
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, Forbidden
from moiety_platform.openapi.described import fails
from moiety_platform.query_parameters import some_of
from moiety_platform.quota.service import list_quotas
from moiety_platform.tenants.service import get_tenant
from moiety_platform.time_span import TimeSpanDependency
from moiety_platform.usage.queries import UsageFilter, parse_grouping, sum_usage
from moiety_platform.usage.reconciliation import take_snapshot_locks
from moiety_platform.usage.schemas import UsageReport, without_expert_bytes

GROUPINGS = ("project", "model", "service_class", "hour", "day")

OwnGroups = Annotated[
    str | None, some_of("Groupings of the sums, separated by commas; one total by default.", GROUPINGS)
]


class SelfServiceController(Controller):
    """Routes of users for themselves."""

    path = "/me"
    tags = ("me",)

    @get(opt=needs(READ_OWN))
    async def get_self(
        self, database: NamedDependency[Database], now: NamedDependency[datetime], caller: NamedDependency[Caller]
    ) -> SelfView:
        """Return yourself, your tenant, and which keys you may make."""
        async with database.read() as session:
            user = await _user(session, caller)
            tenant = await get_tenant(session, str(user.tenant_id))
            policy = await find_policy(session, tenant.id)
            return SelfView(
                user.id,
                user.email,
                user.name,
                user.role,
                tenant.id,
                tenant.name,
                user.project_ids,
                None if policy is None else KeyPolicyView.of(policy),
                await service.count_active_keys(session, user, now),
            )

    @get("/projects", opt=needs(READ_OWN))
    async def list_own_projects(
        self, database: NamedDependency[Database], now: NamedDependency[datetime], caller: NamedDependency[Caller]
    ) -> OwnProjects:
        """List your projects with their quotas and their usage of this month."""
        since = month_start(now)
        async with database.read() as session:
            await take_snapshot_locks(session)
            projects = await service.own_projects(session, await _user(session, caller))
            ids = tuple(project.id for project in projects)
            wanted = UsageFilter(since, max(now, since) + timedelta(seconds=1), among=("project_id", ids))
            report = without_expert_bytes(await sum_usage(session, wanted, ("project",)))
            used = {one.group["project_id"]: one.totals for one in report.data}
            page = PageRequest(MAX_LIMIT)
            return OwnProjects(
                [
                    OwnProject(
                        one.id,
                        one.name,
                        (await list_quotas(session, page, now, scope_id=one.id, tenant_id=None)).data,
                        used.get(one.id),
                    )
                    for one in projects
                ]
            )

    @get("/usage", opt=needs(READ_OWN))
    async def sum_own_usage(
        self,
        database: NamedDependency[Database],
        caller: NamedDependency[Caller],
        period: TimeSpanDependency,
        group_by: OwnGroups = None,
    ) -> UsageReport:
        """Sum the usage of your projects by project, model, service_class, hour and day, in any combination.

        The last 24 hours unless `since` or `until` is given.
        """
        async with database.read() as session:
            await take_snapshot_locks(session)
            user = await _user(session, caller)
            grouping = parse_grouping(group_by)
            if other := [name for name in grouping if name not in GROUPINGS]:
                known = ", ".join(GROUPINGS)
                raise BadRequest(f"'group_by' must be some of {known}, not {other[0]}.", param="group_by")
            projects = await service.own_projects(session, user)
            ids = tuple(project.id for project in projects)
            wanted = UsageFilter(period.since, period.until, among=("project_id", ids))
            return without_expert_bytes(await sum_usage(session, wanted, grouping))

    @get("/keys", opt=needs(READ_OWN))
    async def list_own_keys(
        self,
        database: NamedDependency[Database],
        now: NamedDependency[datetime],
        caller: NamedDependency[Caller],
        page: PageRequestDependency,
    ) -> KeyPage:
        """List your keys, oldest first, with their last use, cost of this month and quotas."""
        async with database.read() as session:
            await take_snapshot_locks(session)
            user = await _user(session, caller)
            return await list_keys(session, page, now, KeyFilter(user_id=user.id), with_details=True)

    @post("/keys", opt=needs(WRITE_OWN_KEYS) | fails(404, 409))
    async def make_own_key(
        self,
        store: NamedDependency[AuditedStore],
        pepper: NamedDependency[Pepper],
        caller: NamedDependency[Caller],
        data: JSONBody[NewOwnKey],
    ) -> CreatedKey:
        """Make a key of yours, within the policy of your tenant; only this response contains its text."""
        now = store.clock.now()
        async with store.write() as session:
            user = await _user(session, caller)
            key, text = await service.make_own_key(session, user, data, pepper.value, now)
        return CreatedKey(key=KeyView.of(key, now), secret=text.text)

    @post("/keys/{key_id:str}/rotate", opt=needs(WRITE_OWN_KEYS) | fails(409))
    async def rotate_own_key(
        self,
        store: NamedDependency[AuditedStore],
        pepper: NamedDependency[Pepper],
        authenticator: NamedDependency[Authenticator],
        caller: NamedDependency[Caller],
        key_id: FromPath[str],
        data: JSONBody[Rotation | None] = None,
    ) -> CreatedKey:
        """Make the successor of a key of yours; the old key works for another `grace_s`, by default one day.

        Fails with 409 `too_many_keys` while more keys of yours work than the policy allows.
        """
        now, grace_s = store.clock.now(), (data or Rotation()).grace_s
        async with store.write() as session:
            user = await _user(session, caller)
            key, text = await service.rotate_own_key(session, user, key_id, grace_s, pepper.value, now)
        authenticator.forget(key_id)
        return CreatedKey(key=KeyView.of(key, now), secret=text.text)

    @post("/keys/{key_id:str}/revoke", status_code=200, opt=needs(WRITE_OWN_KEYS))
    async def revoke_own_key(
        self,
        store: NamedDependency[AuditedStore],
        authenticator: NamedDependency[Authenticator],
        caller: NamedDependency[Caller],
        key_id: FromPath[str],
    ) -> KeyView:
        """Revoke a key of yours, here at once and at every other gateway within seconds."""
        async with store.write() as session:
            key = await service.revoke_own_key(session, await _user(session, caller), key_id, store.clock.now())
        authenticator.forget(key.id)
        return KeyView.of(key, store.clock.now())


async def _user(session: AsyncSession, caller: Caller) -> User:
    """Return the calling user. Raises Forbidden for a key, and for a token without a user."""
    user = None if caller.user_id is None else await session.get(User, caller.user_id)
    if user is None:
        raise Forbidden(
            "This is for users. Ask an administrator of your tenant for an invitation: moiety user invite EMAIL. "
            "Developers by their groups need a token with a verified email address, which no other user of the "
            "tenant has.",
            code=MISSING_ROLE,
        )
    return user

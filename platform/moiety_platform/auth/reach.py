"""How far an administrator of one tenant reaches: which rows of each table are that tenant's.

For such an administrator the store is as if it held nothing else, whatever a query asks for; so what is another
tenant's is missing everywhere in the same way as what does not exist. A table with a column `tenant_id` goes by that;
one without says it in a class method `of_tenant`, or here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import with_loader_criteria
from sqlalchemy.orm.interfaces import ORMOption

from moiety_platform.access.caller import Caller
from moiety_platform.audit.trail import Change
from moiety_platform.classes.models import ClassRecord
from moiety_platform.db.base import Base
from moiety_platform.db.session import Database
from moiety_platform.prices.models import PriceRecord
from moiety_platform.quota.kinds import LimitLevel
from moiety_platform.quota.models import Quota, QuotaLease, QuotaRate, QuotaThreshold, QuotaWindow
from moiety_platform.quota.owners import Condition, own_key, own_quota
from moiety_platform.tenants.models import ApiKey, Project, Tenant
from moiety_platform.usage.models import UsageDayMark

# of no tenant: everybody may know them
SHARED: frozenset[type[Base]] = frozenset({ClassRecord, PriceRecord, UsageDayMark})


class UnownedTable(Exception):
    """A defect of ours: nobody has said whose the rows of a table are."""


def reach_of(caller: Caller, database: Database) -> Database:
    """The store as far as the caller reaches."""
    return database if caller.tenant_id is None else database.restricted(criteria_of(caller.tenant_id))


def criteria_of(tenant_id: str) -> tuple[ORMOption, ...]:
    """For every table that is not shared: which rows are the tenant's. Raises UnownedTable."""
    tables = (mapper.class_ for mapper in Base.registry.mappers)
    return tuple(
        with_loader_criteria(table, rows_of(table, tenant_id), include_aliases=True)
        for table in tables
        if table not in SHARED
    )


async def tenant_of(session: AsyncSession, change: Change) -> str | None:
    """Whose the thing is that was changed; None where it is nobody's."""
    row = change.after or change.before or {}
    if change.object_kind == Tenant.__tablename__:
        return change.object_id
    if change.object_kind == Quota.__tablename__:
        return await _tenant_of_scope(session, LimitLevel(row["level"]), row["scope_id"])
    if row.get("project_id") is not None:
        return await session.scalar(select(Project.tenant_id).where(Project.id == row["project_id"]))
    return row.get("tenant_id")


async def _tenant_of_scope(session: AsyncSession, level: LimitLevel, scope_id: str) -> str | None:
    if level is LimitLevel.TENANT:
        return scope_id
    if level is LimitLevel.PROJECT:
        return await session.scalar(select(Project.tenant_id).where(Project.id == scope_id))
    found = select(Project.tenant_id).join(ApiKey, ApiKey.project_id == Project.id).where(ApiKey.id == scope_id)
    return await session.scalar(found)


def rows_of(table: type[Any], tenant_id: str) -> Condition:
    """Which rows of a table that is not shared are the tenant's. Raises UnownedTable."""
    own = _CONDITIONS.get(table) or getattr(table, "of_tenant", None)
    if own is None and "tenant_id" not in table.__mapper__.columns:
        raise UnownedTable(f"{table.__name__} has no tenant_id: say by its of_tenant whose its rows are")
    condition: Condition = table.tenant_id == tenant_id if own is None else own(tenant_id)
    return condition


def _of_own_quota(table: type[QuotaWindow | QuotaRate | QuotaLease | QuotaThreshold], tenant_id: str) -> Condition:
    return table.quota_id.in_(select(Quota.id).where(own_quota(tenant_id)))


_CONDITIONS: Mapping[type[Any], Callable[[str], Condition]] = MappingProxyType(
    {
        Tenant: lambda tenant_id: Tenant.id == tenant_id,
        ApiKey: own_key,
        Quota: own_quota,
        QuotaWindow: partial(_of_own_quota, QuotaWindow),
        QuotaRate: partial(_of_own_quota, QuotaRate),
        QuotaLease: partial(_of_own_quota, QuotaLease),
        QuotaThreshold: partial(_of_own_quota, QuotaThreshold),
    }
)

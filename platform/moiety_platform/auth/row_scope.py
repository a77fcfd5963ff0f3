"""Row-level restriction of an administrator of one tenant to that tenant's rows.

For a restricted administrator every query sees only these rows, so another tenant's objects are missing in the same way
as objects that do not exist. A table with a column `tenant_id` is restricted by that column; another one defines a
class method `of_tenant`, has a condition here, or is a SharedTable or a DeploymentTable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import with_loader_criteria
from sqlalchemy.orm.interfaces import ORMOption

from moiety_platform.access.caller import Caller
from moiety_platform.audit.trail import Change
from moiety_platform.db.base import Base, SharedTable
from moiety_platform.db.session import Database
from moiety_platform.quota.kinds import LimitLevel
from moiety_platform.quota.models import Quota, QuotaLease, QuotaRate, QuotaThreshold, QuotaWindow
from moiety_platform.quota.owners import Condition, own_key, own_quota
from moiety_platform.tenants.models import ApiKey, Project, Tenant


class UnownedTable(Exception):
    """A defect in the code: a table does not define the tenant of its rows."""


def scoped_database(caller: Caller, database: Database) -> Database:
    """Return the store, restricted to the rows that the caller may reach."""
    return database if caller.tenant_id is None else database.restricted(row_criteria(caller.tenant_id))


def row_criteria(tenant_id: str) -> tuple[ORMOption, ...]:
    """Return the conditions for the tenant's rows of every table that is not shared. Raises UnownedTable."""
    tables = (mapper.class_ for mapper in Base.registry.mappers)
    return tuple(
        with_loader_criteria(table, rows_of(table, tenant_id), include_aliases=True)
        for table in tables
        if not issubclass(table, SharedTable)
    )


def check_tables() -> None:
    """Check that every table that is not shared has a condition for a tenant's rows. Raises UnownedTable."""
    _check(tuple(mapper.class_ for mapper in Base.registry.mappers))


@lru_cache(maxsize=1)
def _check(tables: tuple[type[Any], ...]) -> None:
    for table in tables:
        if not issubclass(table, SharedTable):
            rows_of(table, "")


async def tenant_of(session: AsyncSession, change: Change) -> str | None:
    """Return the tenant of a changed object; None where it has none."""
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
    """Return the condition for the tenant's rows of a table that is not shared. Raises UnownedTable."""
    own = _CONDITIONS.get(table) or getattr(table, "of_tenant", None)
    if own is None and "tenant_id" not in table.__mapper__.columns:
        message = f"{table.__name__} has no tenant_id: make it a SharedTable or a DeploymentTable, or give it of_tenant"
        raise UnownedTable(message)
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

"""Owner of a limit: the tenant that it is set on, or that its project or key belongs to."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, and_, or_, select

from moiety_platform.quota.kinds import LimitLevel
from moiety_platform.quota.models import Quota
from moiety_platform.tenants.models import ApiKey, Project

Condition = ColumnElement[bool]


def own_key(tenant_id: str) -> Condition:
    """Return a condition for keys of the tenant's projects, and keys of its administrators."""
    return or_(ApiKey.tenant_id == tenant_id, ApiKey.project_id.in_(_projects(tenant_id)))


def own_quota(tenant_id: str) -> Condition:
    keys = select(ApiKey.id).where(own_key(tenant_id))
    return or_(
        and_(Quota.level == LimitLevel.TENANT, Quota.scope_id == tenant_id),
        and_(Quota.level == LimitLevel.PROJECT, Quota.scope_id.in_(_projects(tenant_id))),
        and_(Quota.level == LimitLevel.KEY, Quota.scope_id.in_(keys)),
    )


def _projects(tenant_id: str) -> Select[Any]:
    return select(Project.id).where(Project.tenant_id == tenant_id)

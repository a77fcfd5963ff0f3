"""Reads keys and all that decides over them in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select

from moiety_platform.db.session import Database
from moiety_platform.tenants.models import ApiKey, Project, Tenant


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as the database has it. Without a project it is an administrator's, and the tenant's fields are empty."""

    key_id: str
    root_id: str  # of the keys that were rotated to it, the first
    secret_hash: bytes
    scopes: frozenset[str]
    allowed_models: frozenset[str] | None
    expires_at: datetime | None
    revoked_at: datetime | None
    project_id: str
    tenant_id: str
    tenant_name: str
    tenant_status: str
    service_class: str
    weight: float


async def find_keys(database: Database, key_ids: Sequence[str]) -> dict[str, StoredKey]:
    """Those of the keys that there are. Raises Unavailable when the store is away."""
    statement = (
        select(ApiKey, Project, Tenant)
        .outerjoin(Project, Project.id == ApiKey.project_id)
        .outerjoin(Tenant, Tenant.id == Project.tenant_id)
        .where(ApiKey.id.in_(key_ids))
    )
    async with database.read() as session:
        found = (await session.execute(statement)).all()
    return {key.id: _stored(key, project, tenant) for key, project, tenant in found}


def _stored(key: ApiKey, project: Project | None, tenant: Tenant | None) -> StoredKey:
    return StoredKey(
        key_id=key.id,
        root_id=key.root_id or key.id,
        secret_hash=key.secret_hash,
        scopes=frozenset(key.scopes),
        allowed_models=None if key.allowed_models is None else frozenset(key.allowed_models),
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        project_id=project.id if project else "",
        tenant_id=tenant.id if tenant else "",
        tenant_name=tenant.name if tenant else "",
        tenant_status=tenant.status if tenant else "",
        service_class=tenant.service_class if tenant else "",
        weight=tenant.weight if tenant else 1.0,
    )

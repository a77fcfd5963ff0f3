"""Reads keys with their project and tenant in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import and_, case, func, select

from moiety_platform.access.roles import Role
from moiety_platform.auth.users.models import User, UserState
from moiety_platform.db.bulk import BulkStatement
from moiety_platform.db.session import Database
from moiety_platform.tenants.models import ApiKey, Project, SpeculativePrefillMode, Tenant


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as stored in the database.

    Without a project it is an administrator's; without a tenant it is for the whole deployment, and the tenant's fields
    are empty.
    """

    key_id: str
    root_id: str  # the first of the keys that were rotated to it
    secret_hash: bytes
    pepper_mark: str | None
    role: Role | None
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
    speculative_prefill: SpeculativePrefillMode
    is_user_disabled: bool  # or deleted
    role_seen_at: datetime | None  # at which a token gave the key's user its role; None: an administrator has given it
    role_ended_at: datetime | None  # at which a token had it no longer


_HAS_ROLE_OF_TOKEN = and_(User.subject.is_not(None), User.accepted_at.is_(None))
_COLUMNS = (
    ApiKey.id,
    ApiKey.root_id,
    ApiKey.secret_hash,
    ApiKey.pepper_mark,
    ApiKey.role,
    ApiKey.scopes,
    ApiKey.allowed_models,
    ApiKey.expires_at,
    ApiKey.revoked_at,
    Project.id,
    Tenant.id,
    Tenant.name,
    Tenant.status,
    Tenant.service_class,
    Tenant.weight,
    Tenant.speculative_prefill,
    ApiKey.user_id,
    User.state,
    case((_HAS_ROLE_OF_TOKEN, func.coalesce(User.role_seen_at, User.created_at))),
    case((_HAS_ROLE_OF_TOKEN, User.role_ended_at)),
)

_find = BulkStatement(
    [ApiKey.id],
    lambda given, _: (
        select(*_COLUMNS)
        .select_from(ApiKey)
        .outerjoin(Project, Project.id == ApiKey.project_id)
        .outerjoin(Tenant, Tenant.id == func.coalesce(Project.tenant_id, ApiKey.tenant_id))
        .outerjoin(User, User.id == ApiKey.user_id)
        .where(ApiKey.id.in_(given))
    ),
)


async def find_keys(database: Database, key_ids: Sequence[str]) -> dict[str, StoredKey]:
    """Return the keys that exist, by id. Raises Unavailable when the store is down."""
    async with database.read_statements() as session:
        found = await _find.read(session, [(key_id,) for key_id in key_ids])
    return {row[0]: _stored(*row) for row in found}


def _stored(
    key_id: str,
    root_id: str | None,
    secret_hash: bytes,
    pepper_mark: str | None,
    role: str | None,
    scopes: list[str],
    allowed_models: list[str] | None,
    expires_at: datetime | None,
    revoked_at: datetime | None,
    project_id: str | None,
    tenant_id: str | None,
    tenant_name: str | None,
    tenant_status: str | None,
    service_class: str | None,
    weight: float | None,
    speculative_prefill: str | None,
    user_id: str | None,
    user_state: str | None,
    role_seen_at: datetime | None,
    role_ended_at: datetime | None,
) -> StoredKey:
    return StoredKey(
        key_id=key_id,
        root_id=root_id or key_id,
        secret_hash=secret_hash,
        pepper_mark=pepper_mark,
        role=Role.of(role),
        scopes=frozenset(scopes),
        allowed_models=None if allowed_models is None else frozenset(allowed_models),
        expires_at=expires_at,
        revoked_at=revoked_at,
        project_id=project_id or "",
        tenant_id=tenant_id or "",
        tenant_name=tenant_name or "",
        tenant_status=tenant_status or "",
        service_class=service_class or "",
        weight=1.0 if weight is None else weight,
        speculative_prefill=SpeculativePrefillMode(speculative_prefill or SpeculativePrefillMode.OFF),
        is_user_disabled=user_id is not None and user_state in (None, UserState.DISABLED),
        role_seen_at=role_seen_at,
        role_ended_at=role_ended_at,
    )

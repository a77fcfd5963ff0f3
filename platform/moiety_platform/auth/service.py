"""Creates, lists, revokes and rotates keys within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.access.roles import Role, key_complaint, tenant_complaint
from moiety_platform.auth.admin_resource import KEYS
from moiety_platform.auth.key_details import read_details
from moiety_platform.auth.keys import KeyText, generate_key, hash_key, mark_of
from moiety_platform.auth.principal import INFERENCE_SCOPE, scope_of
from moiety_platform.auth.schemas import (
    MAX_ALLOWED_MODELS,
    MAX_GRACE_S,
    MAX_MODEL_LENGTH,
    KeyPage,
    KeyView,
    NewKey,
)
from moiety_platform.db.paging import PageRequest, read_page
from moiety_platform.errors import BadRequest, Conflict
from moiety_platform.jwt_issuers.models import JwtGrantRecord
from moiety_platform.quota.kinds import LimitLevel
from moiety_platform.quota.schemas import NewQuota, caps_by_kind
from moiety_platform.quota.service import set_quota
from moiety_platform.tenants.checks import check_moment, check_name
from moiety_platform.tenants.models import ApiKey, Project
from moiety_platform.tenants.rows import require_row
from moiety_platform.tenants.service import get_project, get_tenant, get_undeleted_tenant


async def create_key(
    session: AsyncSession, new: NewKey, pepper: bytes, now: datetime, *, user_id: str | None = None
) -> tuple[ApiKey, KeyText]:
    """Create a key; return it and its text, which is stored nowhere. `user_id` is that of the user who owns it.

    Raises BadRequest, NotFound for an unknown project or tenant, or Conflict for an erased one.
    """
    expires_at = None if new.expires_at is None else check_moment(new.expires_at, "expires_at")
    if expires_at is not None and expires_at <= now:
        raise BadRequest("'expires_at' must lie in the future.", param="expires_at")
    _check_purpose(new)
    project_id = None
    if new.project_id is not None:
        project = await get_project(session, new.project_id)
        await get_undeleted_tenant(session, project.tenant_id)
        project_id = project.id
    tenant_id = None if new.tenant_id is None else (await get_undeleted_tenant(session, new.tenant_id)).id
    key = ApiKey(
        project_id=project_id,
        role=new.role,
        tenant_id=tenant_id,
        name=check_name(new.name),
        scopes=_check_scopes(new.scopes, new.role),
        allowed_models=check_models(new.allowed_models, "allowed_models"),
        created_at=now,
        expires_at=expires_at,
        user_id=user_id,
    )
    text = await _add_with_text(session, key, pepper)
    for kind, cap in caps_by_kind(new.limits).items():
        await set_quota(session, NewQuota(LimitLevel.KEY, key.id, kind, cap), now)
    return key, text


async def get_key(session: AsyncSession, key_id: str) -> ApiKey:
    """Return the key. Raises NotFound."""
    return await require_row(session, ApiKey, key_id, KEYS)


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """Filter of keys: those of one tenant, project, role, name or user where given."""

    tenant_id: str | None = None
    project_id: str | None = None
    role: Role | None = None
    name: str | None = None
    user_id: str | None = None


async def list_keys(
    session: AsyncSession,
    page: PageRequest,
    now: datetime,
    key_filter: KeyFilter,
    *,
    with_details: bool = False,
) -> KeyPage:
    """Return keys, oldest first, with their details if requested.

    Details need a transaction with a stable snapshot (`take_snapshot_locks`). Raises NotFound for an unknown tenant or
    project, or BadRequest for no name.
    """
    statement = select(ApiKey)
    if key_filter.tenant_id is not None:
        tenant = await get_tenant(session, key_filter.tenant_id)
        statement = statement.outerjoin(Project, Project.id == ApiKey.project_id)
        statement = statement.where(or_(Project.tenant_id == tenant.id, ApiKey.tenant_id == tenant.id))
    if key_filter.project_id is not None:
        statement = statement.where(ApiKey.project_id == (await get_project(session, key_filter.project_id)).id)
    if key_filter.role is not None:
        statement = statement.where(ApiKey.role == key_filter.role)
    if key_filter.name is not None:
        statement = statement.where(ApiKey.name == check_name(key_filter.name))
    if key_filter.user_id is not None:
        statement = statement.where(ApiKey.user_id == key_filter.user_id)
    keys, next_cursor = await read_page(session, statement, page, ApiKey.created_at, ApiKey.id)
    details = await read_details(session, keys, now) if with_details else {}
    return KeyPage([KeyView.of(key, now, details.get(key.id)) for key in keys], next_cursor)


async def revoke_key(session: AsyncSession, key_id: str, now: datetime) -> ApiKey:
    """Revoke a key for good. Revoking it again changes nothing.

    Raises NotFound, or Conflict for the last working owner's key.
    """
    key = await get_key(session, key_id)
    if key.revoked_at is None:
        if key.role == Role.OWNER:
            await _check_not_last_owner(session, key, now)
        key.revoked_at = now
        await session.flush()
    return key


async def rotate_key(
    session: AsyncSession, key_id: str, grace_s: int, pepper: bytes, now: datetime
) -> tuple[ApiKey, KeyText]:
    """Create a successor with the same rights; the old key expires after `grace_s`.

    Raises NotFound, BadRequest, or Conflict if the key no longer works, has a successor, or is an issuer's.
    """
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise BadRequest(f"'grace_s' must be between 0 and {MAX_GRACE_S} seconds.", param="grace_s")
    old = await get_key(session, key_id)
    if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= now):
        raise Conflict("This key is revoked or expired; create a new one instead.", code="key_not_active")
    if await session.scalar(select(JwtGrantRecord.issuer_name).where(JwtGrantRecord.key_id == old.id)) is not None:
        message = "This key is for the JWTs of an issuer and has no text; the issuer rotates its own keys."
        raise Conflict(message, code="key_of_issuer")
    if old.replaced_by is not None:
        raise Conflict(f"This key was rotated already; rotate its successor {old.replaced_by}.", code="key_rotated")
    successor = ApiKey(
        project_id=old.project_id,
        role=old.role,
        tenant_id=old.tenant_id,
        name=old.name,
        scopes=list(old.scopes),
        allowed_models=old.allowed_models,
        created_at=now,
        expires_at=old.expires_at,
        root_id=old.root_id or old.id,
        user_id=old.user_id,
    )
    text = await _add_with_text(session, successor, pepper)
    end_of_grace = now + timedelta(seconds=grace_s)
    old.replaced_by = successor.id
    old.expires_at = end_of_grace if old.expires_at is None else min(old.expires_at, end_of_grace)
    await session.flush()
    return successor, text


async def _add_with_text(session: AsyncSession, key: ApiKey, pepper: bytes) -> KeyText:
    text = generate_key()
    key.id, key.secret_hash, key.hint = text.key_id, hash_key(text, pepper), text.hint
    key.pepper_mark = mark_of(pepper)
    session.add(key)
    await session.flush()
    return text


async def _check_not_last_owner(session: AsyncSession, key: ApiKey, now: datetime) -> None:
    """Check that another owner's key works. Raises Conflict.

    Locks the owners' keys, so that two owners who revoke each other's key cannot both succeed.
    """
    statement = (
        select(ApiKey)
        .where(
            ApiKey.role == Role.OWNER,
            ApiKey.revoked_at.is_(None),
            or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now),
        )
        .order_by(ApiKey.id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    working = (await session.scalars(statement)).all()
    if not any(other.id != key.id for other in working):
        raise Conflict(
            "This is the last working key of an owner; create another one before you revoke it.",
            code="last_admin_key",
        )


def _check_purpose(new: NewKey) -> None:
    """Check that the key has either a project or a role, and a tenant where the role belongs to one.

    Raises BadRequest.
    """
    if new.role is None:
        if new.project_id is None:
            raise BadRequest(
                "Give 'project_id' for a key that clients use, or 'role' for an administrator's.", param="project_id"
            )
        if new.tenant_id is not None:
            raise BadRequest("A project's key has the project's tenant; leave 'tenant_id' out.", param="tenant_id")
    elif new.project_id is not None:
        raise BadRequest("A project's key has no role; leave one of 'project_id' and 'role' out.", param="role")
    elif complaint := key_complaint(new.role):
        raise BadRequest(complaint, param="role")
    elif complaint := tenant_complaint(new.role, new.tenant_id):
        raise BadRequest(complaint, param="tenant_id")
    elif new.limits is not None:
        raise BadRequest("Quotas apply to keys that clients use; leave 'limits' out.", param="limits")


def _check_scopes(scopes: list[str] | None, role: Role | None) -> list[str]:
    allowed = INFERENCE_SCOPE if role is None else scope_of(role)
    if scopes is not None and set(scopes) != {allowed}:
        raise BadRequest(f"This key must have exactly the scope '{allowed}'; leave 'scopes' out.", param="scopes")
    return [allowed]


def check_models(models: list[str] | None, param: str) -> list[str] | None:
    """Return the sorted names of models that a key may use; None: all. Raises BadRequest, which names `param`."""
    if models is None:
        return None
    if not 1 <= len(models) <= MAX_ALLOWED_MODELS:
        message = f"'{param}' must name 1 to {MAX_ALLOWED_MODELS} models, or be null for every model."
        raise BadRequest(message, param=param)
    for model in models:
        if not 1 <= len(model) <= MAX_MODEL_LENGTH or not model.isprintable():
            message = f"A model's name in '{param}' must have 1 to {MAX_MODEL_LENGTH} printable characters."
            raise BadRequest(message, param=param)
    return sorted(set(models))

"""Keys that a user makes for itself, within the policy of its tenant and its own rights. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.access.actions import SELF_SERVICE
from moiety_platform.access.caller import MISSING_ROLE
from moiety_platform.access.roles import Role
from moiety_platform.auth.key_policies.models import KeyPolicy
from moiety_platform.auth.key_policies.service import find_policy
from moiety_platform.auth.keys import KeyText
from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.self_service.schemas import NewOwnKey
from moiety_platform.auth.service import create_key, get_key, revoke_key, rotate_key
from moiety_platform.auth.users.models import User, UserState
from moiety_platform.auth.users.sign_in import USER_DISABLED
from moiety_platform.errors import BadRequest, Conflict, Forbidden, NotFound
from moiety_platform.quota.kinds import LimitKind
from moiety_platform.quota.schemas import QuotaCaps, caps_by_kind
from moiety_platform.tenants.models import ApiKey, Project
from moiety_platform.tenants.service import get_project

NOT_ALLOWED = "key_policy"


async def make_own_key(
    session: AsyncSession, user: User, new: NewOwnKey, pepper: bytes, now: datetime
) -> tuple[ApiKey, KeyText]:
    """Make a key of the user; return it and its text.

    Raises Forbidden for a user who was deleted, disabled or lost the role meanwhile, or where the policy allows no
    keys, Conflict where the user has the most keys, NotFound for a project
    that the user does not reach, or BadRequest for more than the policy allows.
    """
    user = await _lock(session, user)
    policy = await _policy(session, user)
    project = await get_own_project(session, user, new.project_id)
    num_keys = await count_active_keys(session, user, now)
    if num_keys >= policy.max_keys:
        raise Conflict(
            f"{num_keys} keys of yours work, rotated ones in their grace period included, and your tenant allows "
            f"{policy.max_keys}; revoke one first.",
            code="too_many_keys",
        )
    key = NewKey(
        name=new.name,
        project_id=project.id,
        allowed_models=_models(new.allowed_models, policy),
        expires_at=_expiry(new.expires_at, policy, now),
        limits=_limits(new.limits, policy),
    )
    return await create_key(session, key, pepper, now, user_id=user.id)


async def rotate_own_key(
    session: AsyncSession, user: User, key_id: str, grace_s: int, pepper: bytes, now: datetime
) -> tuple[ApiKey, KeyText]:
    """Rotate a key of the user, if the policy still allows such a key. Raises like `make_own_key`.

    The old key works on for its grace period, so a user with the most keys has one more until then, and rotates none.
    """
    user = await _lock(session, user)
    policy = await _policy(session, user)
    key = await get_own_key(session, user, key_id)
    await get_own_project(session, user, str(key.project_id))
    beyond = _beyond(key, policy, now)
    if beyond is not None:
        raise Forbidden(f"The policy of your tenant allows no such key any more: {beyond}.", code=NOT_ALLOWED)
    num_keys = await count_active_keys(session, user, now)
    if num_keys > policy.max_keys:
        raise Conflict(
            f"{num_keys} keys of yours work, rotated ones in their grace period included, and your tenant allows "
            f"{policy.max_keys}; revoke one first, or wait for the end of a grace period.",
            code="too_many_keys",
        )
    return await rotate_key(session, key.id, grace_s, pepper, now)


async def revoke_own_key(session: AsyncSession, user: User, key_id: str, now: datetime) -> ApiKey:
    """Revoke a key of the user, whatever the policy. Raises NotFound."""
    return await revoke_key(session, (await get_own_key(session, user, key_id)).id, now)


async def get_own_key(session: AsyncSession, user: User, key_id: str) -> ApiKey:
    """Return a key that the user made. Raises NotFound for any other."""
    key = await get_key(session, key_id)
    if key.user_id != user.id:
        raise NotFound("There is no key of yours with this id; list them with GET /admin/v1/me/keys.", param="key_id")
    return key


async def get_own_project(session: AsyncSession, user: User, project_id: str) -> Project:
    """Return a project that the user reaches. Raises NotFound."""
    project = await get_project(session, project_id)
    if project.tenant_id != user.tenant_id or not user.reaches(project.id):
        raise NotFound(
            "There is no project of yours with this id; list them with GET /admin/v1/me/projects.", param="project_id"
        )
    return project


async def own_projects(session: AsyncSession, user: User) -> list[Project]:
    """Return the projects that the user reaches, oldest first."""
    wanted = select(Project).where(Project.tenant_id == user.tenant_id).order_by(Project.created_at, Project.id)
    if user.project_ids is not None:
        wanted = wanted.where(Project.id.in_(user.project_ids))
    return list(await session.scalars(wanted))


async def count_active_keys(session: AsyncSession, user: User, now: datetime) -> int:
    """Return the number of the user's keys that work, rotated ones in their grace period included."""
    active = (
        ApiKey.user_id == user.id,
        ApiKey.revoked_at.is_(None),
        or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now),
    )
    return await session.scalar(select(func.count()).select_from(ApiKey).where(*active)) or 0


async def _lock(session: AsyncSession, user: User) -> User:
    """Return the user as it is now, locked, so that only one transaction at a time counts and makes its keys.

    SQLite has only one writer anyway. Raises Forbidden for a user who was deleted or disabled meanwhile, or whose role
    makes no keys any more.
    """
    found = await session.get(User, user.id, with_for_update=True, populate_existing=True)
    if found is None:
        raise Forbidden(
            "Your user was deleted. Ask an administrator of your tenant to invite you again.", code=MISSING_ROLE
        )
    if found.state != UserState.ACTIVE:
        raise Forbidden("Your user is disabled. Ask an administrator of your tenant to enable it.", code=USER_DISABLED)
    if Role(found.role) not in SELF_SERVICE:
        raise Forbidden(
            f"Your role is {found.role} now, which makes no keys. Ask an administrator of your tenant for a key.",
            code=MISSING_ROLE,
        )
    return found


async def _policy(session: AsyncSession, user: User) -> KeyPolicy:
    assert user.tenant_id is not None, "the roles of self-service belong to a tenant"
    policy = await find_policy(session, user.tenant_id)
    if policy is None or not policy.makes_keys:
        raise Forbidden(
            "Your tenant does not allow that its users make keys. Ask its administrator for a key, or for a policy: "
            "moiety key-policy set TENANT.",
            code=NOT_ALLOWED,
        )
    return policy


def _models(asked: list[str] | None, policy: KeyPolicy) -> list[str] | None:
    allowed = policy.allowed_models
    if allowed is None:
        return asked
    if asked is None:
        return list(allowed)
    if other := sorted(set(asked) - set(allowed)):
        raise BadRequest(
            f"Your tenant allows keys for {', '.join(allowed)}, not for {other[0][:64]!r}.", param="allowed_models"
        )
    return asked


def _expiry(asked: datetime | None, policy: KeyPolicy, now: datetime) -> datetime | None:
    if policy.max_days is None:
        return asked
    latest = now + timedelta(days=policy.max_days)
    if asked is None:
        return latest
    if asked.tzinfo is not None and asked > latest:
        raise BadRequest(
            f"Your tenant allows keys of at most {policy.max_days} days; 'expires_at' must not be after "
            f"{latest:%Y-%m-%dT%H:%M:%SZ}.",
            param="expires_at",
        )
    return asked


def _limits(asked: QuotaCaps | None, policy: KeyPolicy) -> QuotaCaps:
    """Return the caps of a key: the policy's, or lower ones that were asked for."""
    caps = {LimitKind(kind): cap for kind, cap in policy.limits.items()}
    for kind, cap in caps_by_kind(asked).items():
        if kind in caps and cap > caps[kind]:
            raise BadRequest(
                f"Your tenant allows at most {caps[kind]} {kind} for a key, not {cap}.", param=f"limits.{kind}"
            )
        caps[kind] = cap
    return _caps(caps)


def _caps(caps: Mapping[LimitKind, int]) -> QuotaCaps:
    return QuotaCaps(**{kind.value: cap for kind, cap in caps.items()})


def _beyond(key: ApiKey, policy: KeyPolicy, now: datetime) -> str | None:
    """Return which of the key's rights the policy does not allow any more; None if it allows all."""
    allowed = policy.allowed_models
    if allowed is not None and (key.allowed_models is None or not set(key.allowed_models) <= set(allowed)):
        return f"it allows only the models {', '.join(allowed)}"
    if policy.max_days is not None and (
        key.expires_at is None or key.expires_at > now + timedelta(days=policy.max_days)
    ):
        return f"it allows at most {policy.max_days} days; make a new key instead"
    return None

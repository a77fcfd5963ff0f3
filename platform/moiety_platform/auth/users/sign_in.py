"""Look-up of the user behind a token at each request of the admin API. Nothing is cached, so changes apply at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, exists, select
from sqlalchemy.orm import aliased

from moiety_platform.access.caller import Caller
from moiety_platform.access.roles import Role
from moiety_platform.auth.users.models import User, UserState
from moiety_platform.db.session import Database
from moiety_platform.errors import Forbidden
from moiety_platform.tenants.models import Tenant, TenantStatus

TENANT_HEADER = "x-moiety-tenant"
TENANT_UNKNOWN = "tenant_unknown"
USER_DISABLED = "user_disabled"


@dataclass(frozen=True, slots=True)
class TokenSubject:
    """The person that a verified token names. `actor` is the name in the audit log.

    `email` is None where the token has none, or one that the issuer has not verified.
    """

    issuer: str
    subject: str
    email: str | None
    actor: str


@dataclass(frozen=True, slots=True)
class Membership:
    """A role of a person, in one tenant or in the whole deployment."""

    user: User
    tenant_name: str | None
    tenant_status: str | None


async def memberships_of(database: Database, subject: TokenSubject) -> list[Membership]:
    """Return the roles that a person has accepted: that of the deployment first, then the oldest.

    Raises Unavailable when the store is down: a token is never accepted without this look-up.
    """
    return await _memberships(database, User.issuer == subject.issuer, User.subject == subject.subject)


async def memberships_of_user(database: Database, user_id: str | None) -> list[Membership]:
    """Return the roles of the person behind a user; none for None. Raises Unavailable."""
    if user_id is None:
        return []
    same = aliased(User)
    own = exists().where(same.id == user_id, same.issuer == User.issuer, same.subject == User.subject)
    return await _memberships(database, own)


async def _memberships(database: Database, *conditions: ColumnElement[bool]) -> list[Membership]:
    found = (
        select(User, Tenant.name, Tenant.status)
        .outerjoin(Tenant, Tenant.id == User.tenant_id)
        .where(*conditions)
        .order_by(User.tenant_id.is_not(None), User.created_at, User.id)
    )
    async with database.read() as session:
        rows: Sequence[Any] = (await session.execute(found)).all()
    return [Membership(*row) for row in rows]


def user_disabled() -> Forbidden:
    """Return the refusal of a disabled user."""
    return Forbidden("This user is disabled. Ask an administrator of your tenant to enable it.", code=USER_DISABLED)


def no_role_in_tenant() -> Forbidden:
    """Return the refusal of a person without a role in the tenant that the request names."""
    return Forbidden(
        f"You have no role in the tenant that the header {TENANT_HEADER} names; see: GET /admin/v1/caller.",
        code=TENANT_UNKNOWN,
    )


def choose_caller(subject: TokenSubject, memberships: Sequence[Membership], tenant_id: str | None) -> Caller | None:
    """Return the caller; None for a person who is no user here.

    `tenant_id` is the tenant that the request names in `TENANT_HEADER`; without it the first role that is neither
    disabled nor in a suspended tenant is used. Raises Forbidden for a disabled user, a suspended tenant, or a tenant in
    which the person has no role.
    """
    if not memberships:
        return None
    reached = [one for one in memberships if tenant_id is None or one.user.tenant_id == tenant_id]
    if not reached:
        raise no_role_in_tenant()
    enabled = [one for one in reached if one.user.state == UserState.ACTIVE]
    if not enabled:
        raise user_disabled()
    chosen = next((one for one in enabled if one.tenant_status in (None, TenantStatus.ACTIVE)), None)
    if chosen is None:
        raise Forbidden(
            f"The tenant {enabled[0].tenant_name!r} is suspended. Ask your administrator to activate it.",
            code="tenant_suspended",
        )
    return Caller(subject.actor, Role(chosen.user.role), chosen.user.tenant_id, chosen.user.id)

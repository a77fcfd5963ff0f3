"""Creates, invites, changes and deletes users within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.access.actions import SELF_SERVICE
from moiety_platform.access.roles import Role, tenant_complaint
from moiety_platform.auth.users.admin_resource import USERS
from moiety_platform.auth.users.invitations import (
    INVITATION_INVALID,
    Invitation,
    create_invitation,
    invitation_ended,
)
from moiety_platform.auth.users.models import MAX_EMAIL_LENGTH, MAX_SUBJECT_LENGTH, User, UserState
from moiety_platform.auth.users.schemas import (
    MAX_PROJECTS,
    MAX_VALID_HOURS,
    MIN_VALID_HOURS,
    NewUser,
    UserChange,
    UserPage,
    UserView,
)
from moiety_platform.auth.users.sign_in import USER_DISABLED, TokenSubject
from moiety_platform.db.paging import PageRequest, read_page
from moiety_platform.errors import BadRequest, Conflict, Forbidden
from moiety_platform.tenants.checks import check_name, new_id
from moiety_platform.tenants.models import ApiKey
from moiety_platform.tenants.rows import require_row
from moiety_platform.tenants.service import get_project, get_tenant, get_undeleted_tenant

_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
STATES = (UserState.ACTIVE, UserState.DISABLED)


def check_email(email: str) -> str:
    """Return an address in the form in which it is stored: NFC, lower case. Raises BadRequest."""
    address = unicodedata.normalize("NFC", email).lower()
    if not _EMAIL.fullmatch(address) or len(address) > MAX_EMAIL_LENGTH or not address.isprintable():
        raise BadRequest(f"'email' must be an address such as ada@example.com, not {email[:64]!r}.", param="email")
    return address


async def create_user(session: AsyncSession, new: NewUser, now: datetime) -> User:
    """Create a user, who cannot sign in before an invitation is accepted.

    Raises BadRequest, NotFound, or Conflict if the address has a role there already.
    """
    if complaint := tenant_complaint(new.role, new.tenant_id):
        raise BadRequest(complaint, param="tenant_id")
    tenant_id = None if new.tenant_id is None else (await get_undeleted_tenant(session, new.tenant_id)).id
    user = User(
        id=new_id("usr"),
        email=check_email(new.email),
        name=check_name(new.name) if new.name else "",
        role=new.role,
        tenant_id=tenant_id,
        project_ids=await _check_projects(session, new.project_ids, new.role, tenant_id),
        state=UserState.INVITED,
        created_at=now,
    )
    session.add(user)
    try:
        await session.flush()
    except IntegrityError as error:
        where = "all tenants" if tenant_id is None else "this tenant"
        message = f"{user.email} has a role in {where} already; change it, or make another invitation."
        raise Conflict(message, code="user_exists", param="email") from error
    return user


async def get_user(session: AsyncSession, user_id: str) -> User:
    """Return the user. Raises NotFound."""
    return await require_row(session, User, user_id, USERS)


async def lock_user(session: AsyncSession, user_id: str) -> User:
    """Return the user as it is now, locked until the transaction ends. Raises NotFound.

    A user makes keys under the same lock, so no key appears while the user is changed or deleted.
    """
    return await require_row(session, User, user_id, USERS, locks=True)


async def lock_user_everywhere(session: AsyncSession, user_id: str) -> tuple[User, list[User]]:
    """Return the user, and all roles of its address in all tenants and the deployment; they are locked.

    All are locked in one order, whichever of them is named, so that two of these transactions wait for each other and
    do not deadlock. Raises NotFound.
    """
    user = await get_user(session, user_id)
    same = select(User).where(User.email == user.email).order_by(User.id).with_for_update()
    roles = list(await session.scalars(same.execution_options(populate_existing=True)))
    if user not in roles:  # deleted since it was read
        session.expunge(user)
        user = await get_user(session, user_id)
    return user, roles


async def list_users(
    session: AsyncSession, page: PageRequest, *, tenant_id: str | None = None, email: str | None = None
) -> UserPage:
    """Return users, oldest first. Raises NotFound for an unknown tenant, or BadRequest for no address."""
    statement = select(User)
    if tenant_id is not None:
        statement = statement.where(User.tenant_id == (await get_tenant(session, tenant_id)).id)
    if email is not None:
        statement = statement.where(User.email == check_email(email))
    users, next_cursor = await read_page(session, statement, page, User.created_at, User.id)
    return UserPage([UserView.of(user) for user in users], next_cursor)


@dataclass(frozen=True, slots=True)
class ChangedUser:
    """A user after a change, and its keys that gateways must read again."""

    user: User
    key_ids: Sequence[str]


async def change_user(session: AsyncSession, user: User, change: UserChange, now: datetime) -> ChangedUser:
    """Change the given fields; keys beyond the new rights are revoked for good. Raises BadRequest or NotFound."""
    user = await lock_user(session, user.id)
    if not isinstance(change.name, msgspec.UnsetType):
        user.name = check_name(change.name) if change.name else ""
    if not isinstance(change.role, msgspec.UnsetType):
        if complaint := tenant_complaint(change.role, user.tenant_id):
            raise BadRequest(complaint, param="role")
        user.role = change.role
        if user.has_role_of_token:  # from now on the administrator's, whatever later tokens say
            user.accepted_at = now
    if not isinstance(change.project_ids, msgspec.UnsetType):
        user.project_ids = await _check_projects(session, change.project_ids, Role(user.role), user.tenant_id)
    elif user.role != Role.DEVELOPER:
        user.project_ids = None
    if not isinstance(change.state, msgspec.UnsetType):
        if change.state not in STATES:
            raise BadRequest(f"'state' must be one of: {', '.join(STATES)}.", param="state")
        set_state(user, UserState(change.state))
    elif change.everywhere:
        raise BadRequest("'everywhere' needs a 'state'; give it, or leave 'everywhere' out.", param="everywhere")
    await session.flush()
    return ChangedUser(user, await _revoke_keys_beyond_rights(session, user, now))


def set_state(user: User, state: UserState) -> None:
    """Disable a user, which also ends its invitation, or enable it again."""
    if state is UserState.DISABLED:
        user.state, user.invitation_hash, user.invitation_expires_at = state, None, None
    elif user.state == UserState.DISABLED:
        user.state = UserState.INVITED if user.subject is None else UserState.ACTIVE


async def key_ids_of(session: AsyncSession, user_id: str) -> list[str]:
    """Return the ids of the user's keys that are not revoked."""
    found = select(ApiKey.id).where(ApiKey.user_id == user_id, ApiKey.revoked_at.is_(None))
    return list(await session.scalars(found))


async def invite_user(
    session: AsyncSession, user: User, valid_hours: int, pepper: bytes, now: datetime
) -> tuple[str, datetime]:
    """Make an invitation, which replaces an open one; return it and its end.

    Raises BadRequest, NotFound, or Conflict for a user who has signed in already or is disabled.
    """
    user = await lock_user(session, user.id)
    if not MIN_VALID_HOURS <= valid_hours <= MAX_VALID_HOURS:
        raise BadRequest(f"'valid_hours' must be from {MIN_VALID_HOURS} to {MAX_VALID_HOURS}.", param="valid_hours")
    if user.state == UserState.DISABLED:
        raise Conflict("This user is disabled; enable it before you invite it again.", code=USER_DISABLED)
    if user.state == UserState.ACTIVE:
        raise Conflict("This user can sign in already, and needs no invitation.", code="user_active")
    if user.tenant_id is not None:
        await get_undeleted_tenant(session, user.tenant_id)
    expires_at = (now + timedelta(hours=valid_hours)).replace(microsecond=0)
    text, user.invitation_hash = create_invitation(user.id, expires_at, pepper)
    user.invitation_expires_at = expires_at
    await session.flush()
    return text, expires_at


async def accept_invitation(
    session: AsyncSession, invitation: Invitation, subject: TokenSubject, now: datetime
) -> User:
    """Bind the person to the invited user, once.

    Raises Forbidden, Gone for an invitation that was used or replaced, or Conflict for a person who has a role there.
    """
    user = await session.get(User, invitation.user_id, with_for_update=True, populate_existing=True)
    is_open = user is not None and user.state == UserState.INVITED and user.invitation_hash is not None
    if user is None or not is_open or user.invitation_hash != invitation.stored_hash:
        raise invitation_ended("was used or replaced already")
    if subject.email is not None and check_email(subject.email) != user.email:
        raise Forbidden(
            "This invitation is for another email address than that of your sign-in; sign in with the invited one.",
            code=INVITATION_INVALID,
        )
    if len(subject.subject) > MAX_SUBJECT_LENGTH:
        raise Forbidden("The subject of the token is longer than 255 characters.", code=INVITATION_INVALID)
    same = select(User).where(
        User.issuer == subject.issuer,
        User.subject == subject.subject,
        User.tenant_id.is_(None) if user.tenant_id is None else User.tenant_id == user.tenant_id,
    )
    if (await session.scalars(same)).first() is not None:
        raise _has_role()
    user.issuer, user.subject = subject.issuer, subject.subject
    user.state, user.accepted_at = UserState.ACTIVE, now
    user.invitation_hash = user.invitation_expires_at = None
    try:
        await session.flush()
    except IntegrityError as error:  # the person has accepted another invitation meanwhile
        raise _has_role() from error
    return user


def _has_role() -> Conflict:
    return Conflict("You have a role there already; ask an administrator to change it.", code="user_exists")


async def delete_user(session: AsyncSession, user: User, now: datetime) -> Sequence[str]:
    """Delete a user and revoke its keys; return their ids. Raises NotFound for a user who is deleted already."""
    user = await lock_user(session, user.id)
    revoked = await _revoke(session, user.id, now)
    await session.delete(user)
    await session.flush()
    return revoked


async def _revoke_keys_beyond_rights(session: AsyncSession, user: User, now: datetime) -> list[str]:
    if Role(user.role) not in SELF_SERVICE:
        return await _revoke(session, user.id, now)
    if user.project_ids is None:
        return []
    return await _revoke(session, user.id, now, kept_projects=user.project_ids)


async def _revoke(session: AsyncSession, user_id: str, now: datetime, kept_projects: Sequence[str] = ()) -> list[str]:
    wanted = select(ApiKey).where(
        ApiKey.user_id == user_id, ApiKey.revoked_at.is_(None), ApiKey.project_id.not_in(kept_projects)
    )
    keys = (await session.scalars(wanted)).all()
    for key in keys:
        key.revoked_at = now
    await session.flush()
    return [key.id for key in keys]


async def _check_projects(
    session: AsyncSession, project_ids: list[str] | None, role: Role, tenant_id: str | None
) -> list[str] | None:
    """Return the developer's projects, each once. Raises BadRequest, or NotFound for one of another tenant."""
    if project_ids is None:
        return None
    if role is not Role.DEVELOPER:
        raise BadRequest(
            f"Only developers are restricted to projects; leave 'project_ids' out for the role '{role}'.",
            param="project_ids",
        )
    if not 1 <= len(project_ids) <= MAX_PROJECTS:
        raise BadRequest(
            f"'project_ids' must have 1 to {MAX_PROJECTS} projects, or be null for all.", param="project_ids"
        )
    projects = [await get_project(session, one) for one in sorted(set(project_ids))]
    for project in projects:
        if project.tenant_id != tenant_id:
            raise BadRequest(f"The project {project.id} belongs to another tenant.", param="project_ids")
    return [project.id for project in projects]

"""Creation of developers at their first sign-in, if the groups or claims of their tokens give them that role.

The tokens keep giving the role: a later one without it is refused, as if there were no user.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from moiety_platform.access.roles import Role
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.users.models import MAX_ISSUER_LENGTH, MAX_SUBJECT_LENGTH, User, UserState
from moiety_platform.auth.users.service import check_email
from moiety_platform.auth.users.sign_in import TokenSubject
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.tenants.checks import new_id
from moiety_platform.tenants.service import get_undeleted_tenant


async def provision_developer(
    store: AuditedStore, subject: TokenSubject, tenant_id: str, issued_at: datetime
) -> User | None:
    """Create the user of a person whose token gives the role `developer` in a tenant, and return it.

    `issued_at` is the time at which the token was issued.

    Returns None if the token has no verified email address that can be stored, or if the tenant has a user of this
    address, who accepts an invitation instead. Raises Unavailable, or Conflict for a tenant whose data was deleted.
    """
    email = _storable_email(subject)
    if email is None:
        return None
    if (found := await _find_by_address(store.database, tenant_id, email)) is not None:
        return _if_of(found, subject)
    user = User(
        id=new_id("usr"),
        email=email,
        name="",
        role=Role.DEVELOPER,
        tenant_id=tenant_id,
        state=UserState.ACTIVE,
        issuer=subject.issuer,
        subject=subject.subject,
        created_at=store.clock.now(),
        role_seen_at=issued_at,
    )
    try:
        async with store.write() as session:
            await get_undeleted_tenant(session, tenant_id)
            session.add(user)
            await session.flush()
    except IntegrityError:  # another request has created a user of this address meanwhile
        found = await _find_by_address(store.database, tenant_id, email)
        return None if found is None else _if_of(found, subject)
    return user


async def _find_by_address(database: Database, tenant_id: str, email: str) -> User | None:
    async with database.read() as session:
        return (await session.scalars(select(User).where(User.tenant_id == tenant_id, User.email == email))).first()


def _if_of(user: User, subject: TokenSubject) -> User | None:
    """Return the user if it is that person, which another request has created, otherwise None."""
    return user if (user.issuer, user.subject) == (subject.issuer, subject.subject) else None


def _storable_email(subject: TokenSubject) -> str | None:
    if subject.email is None or len(subject.subject) > MAX_SUBJECT_LENGTH or len(subject.issuer) > MAX_ISSUER_LENGTH:
        return None
    try:
        return check_email(subject.email)
    except BadRequest:
        return None

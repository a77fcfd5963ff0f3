"""Record of the roles that tokens give to developers by groups: the last time that they gave one, and its end.

The keys of a user act without a token. With this record they stop when the role ends, or has not been seen for long.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from datetime import datetime, timedelta

import structlog
from sqlalchemy import update

from moiety_platform.auth.users.models import User
from moiety_platform.db.session import Database

ROLE_ENDED = "user_role_ended"
SEEN_EVERY = timedelta(hours=1)  # a role is recorded as seen at most this often

log = structlog.get_logger(__name__)


async def record_roles(
    database: Database, users: Sequence[User], given: Set[str], ended: Set[str], issued_at: datetime
) -> None:
    """Record of users by tokens in which tenants their role was given, and in which it ended. Raises Unavailable.

    A token counts from the time at which it was issued. One that is older than what is recorded changes nothing: a
    person who has lost the role may still have a valid token from before.
    """
    for user in users:
        seen_at, ended_at = user.role_seen_at, user.role_ended_at
        if user.tenant_id in given:
            if ended_at is None and seen_at is not None and issued_at - seen_at < SEEN_EVERY:
                continue
            if ended_at is not None and issued_at < ended_at:
                continue
            values = {"role_seen_at": issued_at, "role_ended_at": None}
        elif user.tenant_id in ended and ended_at is None and (seen_at is None or issued_at >= seen_at):
            values = {"role_ended_at": issued_at}
            log.info("user_role_ended", user_id=user.id, tenant_id=user.tenant_id)
        else:
            continue
        async with database.write() as session:
            await session.execute(update(User).where(User.id == user.id).values(**values))


def role_expiry(seen_at: datetime, ended_at: datetime | None, days: float) -> datetime | None:
    """Return the time from which the keys of a user by tokens are refused; None for none.

    `days` are those after the last token with the role, 0 for no limit.
    """
    if ended_at is not None:
        return ended_at
    return seen_at + timedelta(days=days) if days else None

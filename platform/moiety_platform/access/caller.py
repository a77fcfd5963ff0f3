"""The administrator behind an admin API request, and the check of what it may do."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.access.actions import AdminAction
from moiety_platform.access.roles import Role
from moiety_platform.errors import Forbidden

MISSING_ROLE = "missing_role"


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated administrator.

    `actor` is its name in the audit log. `tenant_id` is the tenant that it belongs to, None for an administrator of the
    whole deployment. `user_id` is that of a user who has signed in, None for a key and for a token without a user.
    """

    actor: str
    role: Role
    tenant_id: str | None
    user_id: str | None = None

    def may(self, action: AdminAction) -> bool:
        return self.role in (action.anyone if self.tenant_id is None else action.own)

    def require(self, action: AdminAction) -> None:
        """Check that the caller may do this. Raises Forbidden, whose message names the roles that may."""
        if not self.may(action):
            mine = f"'{self.role}'" if self.tenant_id is None else f"'{self.role}' of one tenant"
            raise Forbidden(
                f"This needs the role {_roles(action)}; yours is {mine}. Use another key, or ask an owner.",
                code=MISSING_ROLE,
            )


def _roles(action: AdminAction) -> str:
    """Return the roles that may perform an action, those of the whole deployment first.

    Example: `'owner', 'operator' or 'tenant-admin'`.
    """
    names = [f"'{role}'" for role in Role if role in action.anyone]
    names += [f"'{role}' of one tenant" for role in Role if role in action.own]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

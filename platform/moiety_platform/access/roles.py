"""The roles of administrators."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Role of an administrator, or of a developer.

    `TENANT_ADMIN` and `DEVELOPER` always belong to one tenant, `VIEWER` can, the others never do. Only users who sign
    in are developers: no key has this role.
    """

    OWNER = "owner"
    OPERATOR = "operator"
    TENANT_ADMIN = "tenant-admin"
    VIEWER = "viewer"
    DEVELOPER = "developer"

    @classmethod
    def of(cls, name: str | None) -> Role | None:
        """Return the role with this name, or None.

        A role that only a later release knows counts as None and grants nothing.
        """
        return cls(name) if name in frozenset(cls) else None


def tenant_complaint(role: Role, tenant: str | None) -> str | None:
    """Return why an administrator of this role cannot belong to this tenant (None: no tenant); None where it can."""
    if role in (Role.TENANT_ADMIN, Role.DEVELOPER) and tenant is None:
        return f"The role '{role}' is for one tenant; name the tenant."
    if role in (Role.OWNER, Role.OPERATOR) and tenant is not None:
        return f"The role '{role}' is for all tenants; leave the tenant out, or choose tenant-admin or viewer."
    return None


def key_complaint(role: Role) -> str | None:
    """Return why no key can have this role; None where a key can."""
    if role is Role.DEVELOPER:
        return f"The role '{role}' is for users who sign in; create one with: moiety user invite EMAIL."
    return None

"""The roles of administrators."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What an administrator is. `TENANT_ADMIN` always belongs to one tenant, `VIEWER` may, the others never do."""

    OWNER = "owner"
    OPERATOR = "operator"
    TENANT_ADMIN = "tenant-admin"
    VIEWER = "viewer"

    @classmethod
    def of(cls, name: str | None) -> Role | None:
        """None for no role, and for one that only a later release knows: that lets nobody in."""
        return cls(name) if name in frozenset(cls) else None


def tenant_complaint(role: Role, tenant: str | None) -> str | None:
    """Why an administrator of this role cannot belong to this tenant (None: to none); None where it can."""
    if role is Role.TENANT_ADMIN and tenant is None:
        return f"The role '{role}' is for one tenant; say for which."
    if role in (Role.OWNER, Role.OPERATOR) and tenant is not None:
        return f"The role '{role}' is for all tenants; leave the tenant out, or choose tenant-admin or viewer."
    return None

"""Scopes of keys. The actions of an administrator depend on its role (access/table.py)."""

from __future__ import annotations

from moiety_platform.access.roles import Role
from moiety_platform.auth.principal import Principal
from moiety_platform.errors import Forbidden

ADMIN_SCOPE = "admin"
INFERENCE_SCOPE = "inference"


def scope_of(role: Role) -> str:
    """Return the scope of a role: `admin` for owners.

    Other roles have scopes of their own, so that releases from before there were roles, where `admin` allows
    everything, grant them nothing.
    """
    return ADMIN_SCOPE if role is Role.OWNER else f"{ADMIN_SCOPE}:{role}"


def require_scope(principal: Principal, scope: str) -> None:
    """Check that the key has the scope. Raises Forbidden."""
    if scope not in principal.scopes:
        raise Forbidden(
            f"This key lacks the scope '{scope}', which this endpoint needs; use a key that has it.",
            code="missing_scope",
        )

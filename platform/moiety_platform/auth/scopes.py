"""What a key is for. What an administrator may do is decided by its role (access/table.py)."""

from __future__ import annotations

from moiety_platform.access.roles import Role
from moiety_platform.auth.principal import Principal
from moiety_platform.errors import Forbidden

ADMIN_SCOPE = "admin"
INFERENCE_SCOPE = "inference"


def scope_of(role: Role) -> str:
    """`admin` for owners. Other roles have scopes of their own, so that releases from before there were roles, to
    which `admin` is everything, let them in nowhere."""
    return ADMIN_SCOPE if role is Role.OWNER else f"{ADMIN_SCOPE}:{role}"


def require_scope(principal: Principal, scope: str) -> None:
    """Raises Forbidden unless the key has the scope."""
    if scope not in principal.scopes:
        raise Forbidden(
            f"This key lacks the scope '{scope}', which this endpoint needs; use a key that has it.",
            code="missing_scope",
        )

"""What a key may do. Roles narrower than "administrator" become scopes of their own beside these."""

from __future__ import annotations

from moiety_platform.auth.principal import Principal
from moiety_platform.errors import Forbidden

ADMIN_SCOPE = "admin"
INFERENCE_SCOPE = "inference"


def require_scope(principal: Principal, scope: str) -> None:
    """Raises Forbidden unless the key has the scope."""
    if scope not in principal.scopes:
        raise Forbidden(
            f"This key lacks the scope '{scope}', which this endpoint needs; use a key that has it.",
            code="missing_scope",
        )

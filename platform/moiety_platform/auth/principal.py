"""The authenticated caller of a request."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.access.roles import Role
from moiety_platform.errors import Forbidden
from moiety_platform.tenants.models import SpeculativePrefillMode


@dataclass(frozen=True, slots=True)
class Principal:
    """A resolved key.

    `cache_salt` is derived on the server from the tenant and starts its prefix-cache chain; `allowed_models` None means
    every served model; `scopes` are e.g. `inference`, `admin`. `role` is an administrator's, None for a client's key;
    an administrator of all tenants has an empty `tenant_id`. `end_user` is that of a JWT, None for a key itself.
    """

    key_id: str
    root_key_id: str  # the key whose quotas apply: the first of the keys that were rotated to this one
    tenant_id: str
    tenant_name: str
    project_id: str
    service_class: str
    weight: float
    cache_salt: bytes
    scopes: frozenset[str]
    role: Role | None = None
    allowed_models: frozenset[str] | None = None
    speculative_prefill: SpeculativePrefillMode = SpeculativePrefillMode.OFF
    end_user: str | None = None


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
        raise missing_scope(scope)


def missing_scope(scope: str) -> Forbidden:
    """Return the error of a key without the scope."""
    return Forbidden(
        f"This key lacks the scope '{scope}', which this endpoint needs; use a key that has it.", code="missing_scope"
    )

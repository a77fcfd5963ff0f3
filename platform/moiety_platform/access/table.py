"""The access control table of the admin API.

Every admin route names its action in its `opt`; a route without an action is not served. The contents of a request can
require a second action, for example a quota on a whole tenant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from moiety_platform.access.roles import Role

ACTION = "action"  # its name in a route's `opt`


class AdminAction(StrEnum):
    """Actions of the admin API."""

    READ_TENANTS = "tenants.read"
    WRITE_TENANTS = "tenants.write"
    ERASE_TENANTS = "tenants.erase"
    READ_PROJECTS = "projects.read"
    WRITE_PROJECTS = "projects.write"
    READ_KEYS = "keys.read"
    WRITE_KEYS = "keys.write"
    WRITE_ADMIN_KEYS = "admin_keys.write"
    READ_QUOTAS = "quotas.read"
    WRITE_QUOTAS = "quotas.write"
    WRITE_TENANT_QUOTAS = "tenant_quotas.write"
    READ_USAGE = "usage.read"
    RECONCILE_USAGE = "usage.reconcile"
    READ_OVERVIEW = "overview.read"
    READ_AUDIT = "audit.read"
    VERIFY_AUDIT = "audit.verify"
    READ_CLASSES = "classes.read"
    WRITE_CLASSES = "classes.write"
    READ_PRICES = "prices.read"
    WRITE_PRICES = "prices.write"
    READ_ENGINES = "engines.read"
    REST_ENGINES = "engines.rest"
    READ_EXPERTS = "experts.read"
    PLAN_EXPERTS = "experts.plan"
    ERASE_KEPT_ANSWERS = "kept_answers.erase"
    READ_WEBHOOKS = "webhooks.read"
    WRITE_WEBHOOKS = "webhooks.write"
    READ_TRACES = "traces.read"
    SIMULATE = "simulations.run"
    READ_DECLARATIONS = "declarations.read"
    WRITE_DECLARATIONS = "declarations.write"
    READ_ADAPTERS = "adapters.read"
    WRITE_ADAPTERS = "adapters.write"
    GRANT_ADAPTERS = "adapters.grant"
    READ_SETTINGS = "settings.read"


@dataclass(frozen=True, slots=True)
class AccessRule:
    """Roles that may perform an action.

    `anyone` are the roles of administrators of the whole deployment, who may act on every object. `own` are the roles
    of administrators of one tenant, who may act on objects of that tenant and on objects without a tenant. An empty set
    allows nobody.
    """

    anyone: frozenset[Role]
    own: frozenset[Role] = frozenset()


_OWNER = frozenset({Role.OWNER})
_OPERATORS = frozenset({Role.OWNER, Role.OPERATOR})
_READERS = frozenset({Role.OWNER, Role.OPERATOR, Role.VIEWER})
_OWN_WRITERS = frozenset({Role.TENANT_ADMIN})
_OWN_READERS = frozenset({Role.TENANT_ADMIN, Role.VIEWER})

RULES: Mapping[AdminAction, AccessRule] = MappingProxyType(
    {
        AdminAction.READ_TENANTS: AccessRule(anyone=_READERS, own=_OWN_READERS),
        AdminAction.WRITE_TENANTS: AccessRule(anyone=_OPERATORS),
        AdminAction.ERASE_TENANTS: AccessRule(anyone=_OWNER),
        AdminAction.READ_PROJECTS: AccessRule(anyone=_READERS, own=_OWN_READERS),
        AdminAction.WRITE_PROJECTS: AccessRule(anyone=_OPERATORS, own=_OWN_WRITERS),
        AdminAction.READ_KEYS: AccessRule(anyone=_READERS, own=_OWN_READERS),
        AdminAction.WRITE_KEYS: AccessRule(anyone=_OPERATORS, own=_OWN_WRITERS),
        AdminAction.WRITE_ADMIN_KEYS: AccessRule(anyone=_OWNER),
        AdminAction.READ_QUOTAS: AccessRule(anyone=_READERS, own=_OWN_READERS),
        AdminAction.WRITE_QUOTAS: AccessRule(anyone=_OPERATORS, own=_OWN_WRITERS),
        AdminAction.WRITE_TENANT_QUOTAS: AccessRule(anyone=_OPERATORS),
        AdminAction.READ_USAGE: AccessRule(anyone=_READERS, own=_OWN_READERS),
        AdminAction.RECONCILE_USAGE: AccessRule(anyone=_READERS),
        AdminAction.READ_OVERVIEW: AccessRule(anyone=_READERS, own=_OWN_READERS),
        AdminAction.READ_AUDIT: AccessRule(anyone=_OWNER, own=_OWN_READERS),
        AdminAction.VERIFY_AUDIT: AccessRule(anyone=_OWNER),
        AdminAction.READ_CLASSES: AccessRule(anyone=_READERS, own=_OWN_READERS),
        AdminAction.WRITE_CLASSES: AccessRule(anyone=_OPERATORS),
        AdminAction.READ_PRICES: AccessRule(anyone=_READERS, own=_OWN_READERS),
        AdminAction.WRITE_PRICES: AccessRule(anyone=_OPERATORS),
        AdminAction.READ_ENGINES: AccessRule(anyone=_READERS),
        AdminAction.REST_ENGINES: AccessRule(anyone=_OPERATORS),
        AdminAction.READ_EXPERTS: AccessRule(anyone=_READERS, own=_OWN_READERS),
        AdminAction.PLAN_EXPERTS: AccessRule(anyone=_READERS),
        AdminAction.ERASE_KEPT_ANSWERS: AccessRule(anyone=_OPERATORS, own=_OWN_WRITERS),
        AdminAction.READ_WEBHOOKS: AccessRule(anyone=_OPERATORS),  # an address may contain a secret of its receiver
        AdminAction.WRITE_WEBHOOKS: AccessRule(anyone=_OPERATORS),
        AdminAction.READ_TRACES: AccessRule(anyone=_READERS, own=_OWN_READERS),
        AdminAction.SIMULATE: AccessRule(anyone=_OPERATORS),
        AdminAction.READ_DECLARATIONS: AccessRule(anyone=_READERS),
        AdminAction.WRITE_DECLARATIONS: AccessRule(anyone=_OPERATORS),
        AdminAction.READ_ADAPTERS: AccessRule(anyone=_READERS, own=_OWN_READERS),
        AdminAction.WRITE_ADAPTERS: AccessRule(anyone=_OPERATORS, own=_OWN_WRITERS),
        AdminAction.READ_SETTINGS: AccessRule(anyone=_READERS),
        AdminAction.GRANT_ADAPTERS: AccessRule(anyone=_OPERATORS),  # adapters on the engines' hosts
    }
)


def needs(action: AdminAction) -> dict[str, Any]:
    """Return a route's `opt`, which names the action that the route performs."""
    return {ACTION: action}

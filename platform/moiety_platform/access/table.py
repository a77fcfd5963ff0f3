"""The one table of who may do what.

Every route of the admin API names its action in its `opt`; a route that names none is not served. What a request
contains may need a second action, such as a limit on a tenant as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from moiety_platform.access.roles import Role

ACTION = "action"  # its name in a route's `opt`


class Action(StrEnum):
    """What can be done through the admin API."""

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
class Rule:
    """Who may do something: administrators of the whole deployment to `anyone`'s objects, those of one tenant to
    objects of their `own` tenant and to what belongs to no tenant. Nobody where no role stands."""

    anyone: frozenset[Role]
    own: frozenset[Role] = frozenset()


_OWNER = frozenset({Role.OWNER})
_OPERATORS = frozenset({Role.OWNER, Role.OPERATOR})
_READERS = frozenset({Role.OWNER, Role.OPERATOR, Role.VIEWER})
_OWN_WRITERS = frozenset({Role.TENANT_ADMIN})
_OWN_READERS = frozenset({Role.TENANT_ADMIN, Role.VIEWER})

RULES: Mapping[Action, Rule] = MappingProxyType(
    {
        Action.READ_TENANTS: Rule(anyone=_READERS, own=_OWN_READERS),
        Action.WRITE_TENANTS: Rule(anyone=_OPERATORS),
        Action.ERASE_TENANTS: Rule(anyone=_OWNER),
        Action.READ_PROJECTS: Rule(anyone=_READERS, own=_OWN_READERS),
        Action.WRITE_PROJECTS: Rule(anyone=_OPERATORS, own=_OWN_WRITERS),
        Action.READ_KEYS: Rule(anyone=_READERS, own=_OWN_READERS),
        Action.WRITE_KEYS: Rule(anyone=_OPERATORS, own=_OWN_WRITERS),
        Action.WRITE_ADMIN_KEYS: Rule(anyone=_OWNER),
        Action.READ_QUOTAS: Rule(anyone=_READERS, own=_OWN_READERS),
        Action.WRITE_QUOTAS: Rule(anyone=_OPERATORS, own=_OWN_WRITERS),
        Action.WRITE_TENANT_QUOTAS: Rule(anyone=_OPERATORS),
        Action.READ_USAGE: Rule(anyone=_READERS, own=_OWN_READERS),
        Action.RECONCILE_USAGE: Rule(anyone=_READERS),
        Action.READ_OVERVIEW: Rule(anyone=_READERS, own=_OWN_READERS),
        Action.READ_AUDIT: Rule(anyone=_OWNER, own=_OWN_READERS),
        Action.VERIFY_AUDIT: Rule(anyone=_OWNER),
        Action.READ_CLASSES: Rule(anyone=_READERS, own=_OWN_READERS),
        Action.WRITE_CLASSES: Rule(anyone=_OPERATORS),
        Action.READ_PRICES: Rule(anyone=_READERS, own=_OWN_READERS),
        Action.WRITE_PRICES: Rule(anyone=_OPERATORS),
        Action.READ_ENGINES: Rule(anyone=_READERS),
        Action.REST_ENGINES: Rule(anyone=_OPERATORS),
        Action.READ_EXPERTS: Rule(anyone=_READERS, own=_OWN_READERS),
        Action.PLAN_EXPERTS: Rule(anyone=_READERS),
        Action.ERASE_KEPT_ANSWERS: Rule(anyone=_OPERATORS, own=_OWN_WRITERS),
        Action.READ_WEBHOOKS: Rule(anyone=_OPERATORS),  # an address may have a secret of its receiver in it
        Action.WRITE_WEBHOOKS: Rule(anyone=_OPERATORS),
        Action.READ_TRACES: Rule(anyone=_READERS, own=_OWN_READERS),
        Action.SIMULATE: Rule(anyone=_OPERATORS),
        Action.READ_DECLARATIONS: Rule(anyone=_READERS),
        Action.WRITE_DECLARATIONS: Rule(anyone=_OPERATORS),
        Action.READ_ADAPTERS: Rule(anyone=_READERS, own=_OWN_READERS),
        Action.WRITE_ADAPTERS: Rule(anyone=_OPERATORS, own=_OWN_WRITERS),
        Action.READ_SETTINGS: Rule(anyone=_READERS),
        Action.GRANT_ADAPTERS: Rule(anyone=_OPERATORS),  # of those that are on the engines' hosts
    }
)


def needs(action: Action) -> dict[str, Any]:
    """A route's `opt`: what whoever calls it does."""
    return {ACTION: action}

"""Catalog of the administered resources. Imports only their declarations."""

from __future__ import annotations

from moiety_platform.access.actions import AdminAction
from moiety_platform.access.views import VIEW_ACTIONS
from moiety_platform.adapters.admin_resource import ADAPTERS
from moiety_platform.agent_runs.admin_resource import RUNS
from moiety_platform.auth.admin_resource import KEYS
from moiety_platform.auth.key_policies.admin_resource import KEY_POLICIES
from moiety_platform.auth.users.admin_resource import USERS
from moiety_platform.classes.admin_resource import CLASSES
from moiety_platform.declarative_config.admin_resource import DECLARATIONS
from moiety_platform.guardrails.admin_resource import GUARDRAILS
from moiety_platform.jwt_issuers.admin_resource import ISSUERS
from moiety_platform.model_routes.admin_resource import ROUTES
from moiety_platform.prices.admin_resource import PRICES
from moiety_platform.quota.admin_resource import QUOTAS
from moiety_platform.resources.declaration import Resource
from moiety_platform.tenants.admin_resource import PROJECTS, TENANTS
from moiety_platform.webhooks.admin_resource import WEBHOOKS

RESOURCES: tuple[Resource, ...] = (  # dependencies come first: `moiety apply` creates in this order
    CLASSES,
    PRICES,
    ROUTES,
    TENANTS,
    PROJECTS,
    KEYS,
    ISSUERS,
    USERS,
    KEY_POLICIES,
    QUOTAS,
    WEBHOOKS,
    ADAPTERS,
    GUARDRAILS,
    RUNS,
    DECLARATIONS,
)
ACTIONS: tuple[AdminAction, ...] = (*(action for one in RESOURCES for action in one.actions), *VIEW_ACTIONS)

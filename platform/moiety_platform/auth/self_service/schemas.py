"""Request and response bodies of the admin API for users themselves."""

from __future__ import annotations

from typing import Annotated

import msgspec

from moiety_platform.auth.key_policies.schemas import KeyPolicyView
from moiety_platform.auth.schemas import MAX_ALLOWED_MODELS, AwareTime, ModelName
from moiety_platform.openapi.schemas import shows
from moiety_platform.quota.schemas import QuotaCaps, QuotaView
from moiety_platform.tenants.checks import NAME
from moiety_platform.usage.schemas import UsageTotals


class NewOwnKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key that the calling user makes for itself, within the policy of its tenant.

    Without models, expiry or limits the key gets the most that the policy allows. Scopes cannot be chosen: the key is
    for inference.
    """

    name: Annotated[str, NAME]
    project_id: str
    allowed_models: Annotated[list[ModelName], shows(minItems=1, maxItems=MAX_ALLOWED_MODELS)] | None = None
    expires_at: AwareTime | None = None
    limits: QuotaCaps | None = None


class OwnProject(msgspec.Struct, frozen=True):
    """A project that the user reaches, with its quotas and its usage of this month, in UTC."""

    id: str
    name: str
    quotas: list[QuotaView]
    month: UsageTotals | None


class OwnProjects(msgspec.Struct, frozen=True):
    """The projects that the user reaches, oldest first."""

    data: list[OwnProject]


class SelfView(msgspec.Struct, frozen=True):
    """The calling user, and the policy for its keys; null if its tenant has none, so that it makes no keys.

    `num_active_keys` counts the keys that work, rotated keys in their grace period included.
    """

    id: str
    email: str
    name: str
    role: str
    tenant_id: str
    tenant_name: str
    project_ids: list[str] | None
    key_policy: KeyPolicyView | None
    num_active_keys: int

"""Request and response bodies of the admin API for key policies."""

from __future__ import annotations

from typing import Annotated

import msgspec

from moiety_platform.auth.key_policies.models import KeyPolicy
from moiety_platform.auth.schemas import MAX_ALLOWED_MODELS, ModelName
from moiety_platform.db.paging import Page
from moiety_platform.etags import Tagged
from moiety_platform.openapi.schemas import shows
from moiety_platform.quota.schemas import QuotaCaps
from moiety_wire.shared_fields import copy_fields

DEFAULT_MAX_KEYS = 5
MAX_KEYS_OF_USER = 1000
MAX_DAYS = 3650


class NewKeyPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy to set, which replaces that of the tenant. It applies to keys that are made or rotated from then on.

    `max_keys` counts the keys of a user that work, rotated keys in their grace period included.
    """

    tenant_id: str
    makes_keys: bool = True
    max_keys: Annotated[int, shows(minimum=0, maximum=MAX_KEYS_OF_USER)] = DEFAULT_MAX_KEYS
    max_days: Annotated[int, shows(minimum=1, maximum=MAX_DAYS)] | None = None
    allowed_models: Annotated[list[ModelName], shows(minItems=1, maxItems=MAX_ALLOWED_MODELS)] | None = None
    limits: QuotaCaps = QuotaCaps()


class KeyPolicyView(Tagged, frozen=True):
    """The policy of a tenant for keys that its users make for themselves.

    `max_keys` is the number of keys of a user that work, rotated keys in their grace period included: a user with that
    many can rotate one key, and no other before a key is revoked or the grace period ends. `max_days` is the longest
    lifetime of a key. Null is no bound.
    """

    tenant_id: str
    makes_keys: bool
    max_keys: int
    max_days: int | None
    allowed_models: list[str] | None
    limits: dict[str, int]

    @classmethod
    def of(cls, policy: KeyPolicy) -> KeyPolicyView:
        return copy_fields(policy, cls)


class KeyPolicyPage(Page[KeyPolicyView], frozen=True):
    """A page of policies by tenant; `next_cursor` is null on the last page."""

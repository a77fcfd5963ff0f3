"""Limits on stored responses and conversations."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.responses_api.storage_limit import StorageLimit
from moiety_platform.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """Limits on stored responses, their lifetime, and the size of a conversation that a request may continue."""

    ttl_s: float
    storage: StorageLimit
    max_items: int
    max_bytes: int
    stores_by_default: bool = False

    @classmethod
    def of(cls, settings: GatewaySettings) -> ConversationLimits:
        return cls(
            settings.responses_ttl_s,
            StorageLimit(settings.responses_max_per_tenant, settings.responses_max_bytes_per_tenant),
            settings.max_messages,
            settings.max_body_bytes,
            settings.responses_store_by_default and settings.responses_max_per_tenant > 0,
        )

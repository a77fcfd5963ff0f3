"""Limits on the answers that are stored under idempotency keys."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class AnswerStorageLimits:
    """Limits on stored answers and their lifetime."""

    ttl_s: float
    max_answer_bytes: int
    max_keys_per_tenant: int
    max_bytes_per_tenant: int

    @classmethod
    def of(cls, settings: GatewaySettings) -> AnswerStorageLimits:
        return cls(
            ttl_s=settings.idempotency_ttl_s,
            max_answer_bytes=settings.idempotency_max_answer_bytes,
            max_keys_per_tenant=settings.idempotency_max_keys_per_tenant,
            max_bytes_per_tenant=settings.idempotency_max_bytes_per_tenant,
        )

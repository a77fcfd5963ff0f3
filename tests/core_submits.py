"""Requests as an engine's core receives them, with defaults for the fields that a test does not depend on."""

from __future__ import annotations

from typing import Any

from moiety_engine.messages import CoreSubmit
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling


def core_submit(key: int, prompt_ids: list[int], max_tokens: int, **fields: Any) -> CoreSubmit:
    """Return a greedy request of the tenant "t" with credit for all its output, and with these fields instead."""
    defaults: dict[str, Any] = {
        "tenant_id": "t",
        "service": STANDARD,
        "sampling": Sampling(temperature=0.0),
        "min_tokens": 0,
        "stop_token_ids": [],
        "credit_tokens": max_tokens,
        "cache_salt": b"s",
        "arrival_unix_ns": 0,
    }
    return CoreSubmit(key=key, prompt_ids=prompt_ids, max_tokens=max_tokens, **(defaults | fields))

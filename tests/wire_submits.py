"""Requests as a gateway sends them to an engine, with defaults for the fields that a test does not depend on."""

from __future__ import annotations

from typing import Any

from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling, Stopping, Submit


def wire_submit(request_id: str = "r", **fields: Any) -> Submit:
    """Return a request of the tenant "t" for at most 100 tokens of the model "scripted", with these fields instead."""
    defaults: dict[str, Any] = {
        "seq": 0,
        "model": "scripted",
        "tenant_id": "t",
        "service": STANDARD,
        "prompt_ids": [1],
        "sampling": Sampling(),
        "stopping": Stopping(max_tokens=100),
        "credit_tokens": 1,
        "cache_salt": b"s",
        "arrival_unix_ns": 1,
    }
    return Submit(request_id=request_id, **(defaults | fields))

"""Usage rows, with values for the fields that a test does not depend on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from moiety_platform.usage.row import UsageRow

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def make_row(request_id: str, **fields: Any) -> UsageRow:
    """Return the row of a chat of the tenant "ten_a" that ended as it should, and with these fields instead."""
    defaults: dict[str, Any] = {
        **{"tenant_id": "ten_a", "project_id": "prj_a", "key_id": "key_a", "endpoint": "/v1/chat/completions"},
        **{"model": "demo", "service_class": "standard", "started_at": NOON, "outcome": "stop", "http_status": 200},
        **{"num_choices": 1, "prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 7},
        **{"queue_ms": 0.5, "ttft_ms": 12.25, "duration_ms": 40.0},
    }
    return UsageRow(request_id=request_id, **(defaults | fields))

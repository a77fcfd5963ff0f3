"""The usage row: what one request was and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One authenticated request. Tokens are counts; `*_ms` are milliseconds, None where the request did not get there.

    `outcome` is one of: stop, length, disconnected, failed, rejected (refused before it reached an engine).
    `http_status` is what the client was answered (499 after a disconnect)."""

    request_id: str
    tenant_id: str
    project_id: str
    key_id: str
    endpoint: str
    model: str
    service_class: str
    started_at: datetime  # aware UTC
    outcome: str
    http_status: int
    num_choices: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float | None
    ttft_ms: float | None
    duration_ms: float
    error_code: str | None = None

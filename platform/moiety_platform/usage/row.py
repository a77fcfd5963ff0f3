"""The usage row: what one request was and how it ended."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec

from moiety_platform.quota.lease import Charge
from moiety_wire.classes import SPECULATIVE_PREFILL

GATEWAY_KILLED = "gateway_killed"
CONNECTION_LOST = 499


class UsageRow(msgspec.Struct, frozen=True):
    """One authenticated request. Tokens are counts; `*_ms` are milliseconds, None where the request did not get there.

    `outcome` is one of: stop, length, content_filter, disconnected, failed, rejected (refused before anything was
    generated).
    `service_class` is the class that was served, or would have been. `sla_attained` says whether its promise was kept:
    the first token and the last one by their deadlines, or the end by its own; rejected for overload is not kept, and
    None is what the promise did not cover (a bad request, a client that left in time).
    `http_status` is what the client was answered (499 after a disconnect, and where the gateway was killed)."""

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
    num_preemptions: int = 0
    sla_attained: bool | None = None
    cost_nanodollars: int = 0
    speculative_tokens: int = (
        0  # computed before anybody asked for them, which is all that such a row has, and its cost
    )
    speculative_used_tokens: int = 0  # of `cached_tokens`, those that were
    charges: tuple[Charge, ...] = ()  # to be booked with the row, and once, like it; not a column

    @property
    def is_request(self) -> bool:
        """Not where nobody has asked for it: such a row has this name for its endpoint and its class."""
        return self.endpoint != SPECULATIVE_PREFILL


KILLED: Final[dict[str, Any]] = {
    "outcome": "failed",
    "http_status": CONNECTION_LOST,
    "cached_tokens": 0,
    "output_tokens": 0,
    "queue_ms": None,
    "ttft_ms": None,
    "duration_ms": 0.0,
    "error_code": GATEWAY_KILLED,
    "num_preemptions": 0,
    "sla_attained": False,
}
"""What is stored of a running request whose gateway is killed: `failed` with the code `gateway_killed`, and 499, since
the client's connection broke. Its prompt counts, and is what its row charges; how much was generated died with the
process, so output tokens and times are 0, less than what was used."""

"""Usage row: what one request was and how it ended."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec

from moiety_platform.quota.lease import Charge
from moiety_platform.receipts.content import ReceiptDraft
from moiety_wire.classes import SPECULATIVE_PREFILL

GATEWAY_KILLED = "gateway_killed"
NOT_COLUMNS = frozenset({"charges", "receipt"})
CONNECTION_LOST = 499


class UsageRow(msgspec.Struct, frozen=True):
    """One authenticated request. Tokens are counts; `*_ms` are milliseconds, None if the request did not get that far.

    `outcome` is one of: stop, length, content_filter, disconnected, failed, rejected (refused before anything was
    generated).

    `service_class` is the class that was served, or would have been. `slo_attained` says whether the SLO was attained:
    the first and the last token by their deadlines, or the end by its own. A rejection for overload misses the SLO;
    None means that the SLO does not apply (a bad request, a client that left in time).

    `http_status` is the status sent to the client (499 after a disconnect, and if the gateway was killed).
    """

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
    slo_attained: bool | None = None
    cost_nanodollars: int = 0
    # tokens of a speculative prefill; a row of one has only them and its cost
    speculative_tokens: int = 0
    speculative_used_tokens: int = 0  # part of `cached_tokens` that came from speculative prefill
    expert_read_bytes: int = 0  # its shares of the experts' weights that engines read, load and move for it
    expert_moved_bytes: int = 0
    end_user: str | None = None  # that the client named
    tags: str | None = None  # that the client gave, as a JSON object
    guarantee_met: bool | None = None  # of the request's quote; None: no guarantee, or it does not apply
    predicted_ttft_ms: float | None = None  # of the request's quote
    predicted_duration_ms: float | None = None  # for its actual output tokens
    credit_nanodollars: int = 0  # for a missed guarantee; `cost_nanodollars` is what remains after it
    credit_reason: str | None = None
    route: str | None = None  # the name that the client sent, where it is a route; `model` is the one that answered
    trace_id: str | None = None  # in hexadecimal; None where no traces are recorded
    spot_percent: int | None = None  # of the class's price that it paid, in a spot class
    charges: tuple[Charge, ...] = ()  # booked once, together with the row; not a column
    receipt: ReceiptDraft | None = None  # appended to the tenant's chain, together with the row; not a column

    @property
    def is_request(self) -> bool:
        """True for a request, False for a speculative prefill, whose endpoint and class are SPECULATIVE_PREFILL."""
        return self.endpoint != SPECULATIVE_PREFILL


class StoredUsageRow(UsageRow, frozen=True):
    """Usage row as a journal or a billing context has it: releases up to 0.2.0 wrote `sla_attained`.

    Read with `present`, which gives the row with the present names.
    """

    sla_attained: bool | None = None

    @property
    def present(self) -> UsageRow:
        values = {name: getattr(self, name) for name in UsageRow.__struct_fields__}
        if self.slo_attained is None:
            values["slo_attained"] = self.sla_attained
        return UsageRow(**values)


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
    "slo_attained": False,
}
"""Fields of the row stored for a running request whose gateway is killed.

The outcome is `failed` with the code `gateway_killed`, and the status 499, since the client's connection broke. The
prompt counts, and the row charges it. The number of generated tokens is lost with the process, so output tokens and
times are 0, less than what was used.
"""

SPECULATIVE: Final[dict[str, Any]] = {
    "endpoint": SPECULATIVE_PREFILL,
    "service_class": SPECULATIVE_PREFILL,
    "outcome": "speculative",
    "http_status": 0,
    "num_choices": 0,
    "prompt_tokens": 0,
    "cached_tokens": 0,
    "output_tokens": 0,
    "queue_ms": None,
    "ttft_ms": None,
    "duration_ms": 0.0,
}
"""Fields of the row of a speculative prefill, which is not a request: it has tokens of its own, and their cost."""

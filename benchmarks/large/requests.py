"""Requests of many tenants over a month, as usage rows: few tenants send most, and the last hours are busy."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from moiety_platform.usage.row import UsageRow

DAYS = 30
BUSY_HOURS, BUSY_SHARE = 6, 0.4  # of the requests, in the last hours: for which minutes are kept
CLASSES = ("priority", "standard", "flex", "batch")
CLASS_SHARES = (0.1, 0.6, 0.2, 0.1)  # of the tenants
WAITS_MS = {"priority": 4.0, "standard": 60.0, "flex": 900.0, "batch": 4000.0}
TTFT_SLO_MS = {"priority": 500.0, "standard": 2000.0, "flex": 600_000.0, "batch": 86_400_000.0}
MODEL = "moiety-demo"
AT_ONCE = 50_000
ENDS = ("stop", "length", "disconnected", "rejected", "failed")
END_SHARES = (0.88, 0.06, 0.01, 0.04, 0.01)
STATUS = {"stop": 200, "length": 200, "disconnected": 499, "rejected": 429, "failed": 502}
CODES = {"rejected": "overloaded", "failed": "engine_failed"}
NUM_END_USERS = 40  # of a tenant; a fifth of its requests name none
TEAMS = tuple(json.dumps({"team": name}) for name in ("search", "support", "ads", "internal"))


@dataclass(frozen=True)
class Sender:
    """An existing tenant, with one of its projects and keys."""

    tenant_id: str
    project_id: str
    key_id: str
    key: str
    service_class: str


def draw(senders: list[Sender], number: int, until: datetime, seed: int) -> Iterator[list[UsageRow]]:
    """Draw this number of requests in order of their start, ten thousand or so at a time."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(senders) + 1) ** 0.7
    busy = round(number * BUSY_SHARE)
    ago_s = np.concatenate(
        [rng.uniform(0, BUSY_HOURS * 3600, busy), rng.uniform(BUSY_HOURS * 3600, DAYS * 86_400, number - busy)]
    )
    ago_s = -np.sort(-ago_s)
    for first in range(0, number, AT_ONCE):
        times = ago_s[first : first + AT_ONCE]
        who = rng.choice(len(senders), len(times), p=weights / weights.sum())
        figures = {
            "prompt": rng.lognormal(6.0, 0.9, len(times)).astype(int) + 1,
            "output": rng.lognormal(4.8, 0.8, len(times)).astype(int) + 1,
            "wait": rng.exponential(1.0, len(times)),
            "first": rng.lognormal(5.0, 0.4, len(times)),
            "cached": rng.random(len(times)) * 0.6,
            "end": rng.choice(len(ENDS), len(times), p=END_SHARES),
            "user": rng.integers(0, NUM_END_USERS * 5 // 4, len(times)),
        }
        columns = zip(times.tolist(), who.tolist(), *(column.tolist() for column in figures.values()), strict=True)
        yield [_row(until - timedelta(seconds=ago), senders[one], *drawn) for ago, one, *drawn in columns]


def _row(started: datetime, sender: Sender, *drawn: Any) -> UsageRow:
    prompt, output, wait, first, cached_share, end, user = drawn
    outcome = ENDS[end]
    served = outcome in ("stop", "length")
    is_refused = outcome == "rejected"
    queue_ms = wait * WAITS_MS[sender.service_class]
    ttft_ms = queue_ms + first
    generated = 0 if is_refused else output if served else output // 2
    prompt_tokens = 0 if is_refused else prompt
    cached = int(prompt_tokens * cached_share)
    return UsageRow(
        request_id=f"req_{secrets.token_hex(12)}",
        tenant_id=sender.tenant_id,
        project_id=sender.project_id,
        key_id=sender.key_id,
        endpoint="/v1/chat/completions",
        model=MODEL,
        service_class=sender.service_class,
        started_at=started,
        outcome=outcome,
        http_status=STATUS[outcome],
        num_choices=1,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        output_tokens=generated,
        queue_ms=None if is_refused else queue_ms,
        ttft_ms=None if is_refused else ttft_ms,
        duration_ms=2.0 if is_refused else ttft_ms + generated * 14,
        error_code=CODES.get(outcome),
        num_preemptions=int(sender.service_class in ("flex", "batch") and wait > 3),
        slo_attained=None if outcome == "disconnected" else served and ttft_ms <= TTFT_SLO_MS[sender.service_class],
        cost_nanodollars=(prompt_tokens - cached) * 300 + cached * 30 + generated * 1200,
        end_user=f"user-{user}@example.com" if user < NUM_END_USERS else None,
        tags=TEAMS[user % len(TEAMS)],
    )

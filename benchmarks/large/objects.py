"""Agent runs, batches and alerts of a large store, as many as their pages list and more."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import datetime, timedelta
from random import Random
from typing import Any

from moiety_platform.agent_runs.models import AgentRun, AgentRunRequest
from moiety_platform.alerts.models import OperationalAlert
from moiety_platform.batches.models import Batch
from moiety_platform.db.base import Base

from .requests import MODEL, Sender

NUM_RUNS, NUM_BATCHES, NUM_ALERTS = 3000, 2000, 1000
REQUESTS_A_RUN = 20
ENDPOINT = "/v1/chat/completions"


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(10)}"


def objects(senders: list[Sender], until: datetime, rng: Random) -> Iterator[Base]:
    """Return the objects, the newest first."""
    for number in range(NUM_RUNS):
        yield from _run(rng.choice(senders), until - timedelta(minutes=5 * number), number, rng)
    for number in range(NUM_BATCHES):
        yield _batch(rng.choice(senders), until - timedelta(minutes=10 * number), rng)
    for number in range(NUM_ALERTS):
        yield _alert(until - timedelta(minutes=30 * number), number)


def _run(sender: Sender, at: datetime, number: int, rng: Random) -> Iterator[Base]:
    run_id, nano, tokens = _id("run"), rng.randrange(10**8), rng.randrange(10**6)
    yield AgentRun(
        id=run_id, tenant_id=sender.tenant_id, name=f"task-{number}", status=rng.choice(["active", "stopped"]),
        budget_nano=10**9, budget_tokens=10**6, deadline_at=None, deadline_s=None, keep_s=None, used_nano=nano,
        used_tokens=tokens, num_requests=REQUESTS_A_RUN, created_at=at, stopped_at=None,
    )  # fmt: skip
    for turn in range(REQUESTS_A_RUN):
        begun = at + timedelta(seconds=12 * turn)
        yield AgentRunRequest(
            run_id=run_id, request_id=_id("req"), tenant_id=sender.tenant_id, trace_id=secrets.token_hex(16),
            endpoint=ENDPOINT, model=MODEL, started_at=begun, ended_at=begun + timedelta(seconds=9), outcome="stop",
            error_code=None, tokens=tokens // REQUESTS_A_RUN, nano=nano // REQUESTS_A_RUN, prompt_tokens=400,
            cached_tokens=200, output_tokens=120, duration_ms=9000.0,
        )  # fmt: skip


def _batch(sender: Sender, at: datetime, rng: Random) -> Base:
    total, created_ms = rng.randrange(1, 50_000), int(at.timestamp() * 1000)
    failed = rng.randrange(min(total, 9))
    times: dict[str, Any] = {f"{name}_ms": None for name in ("failed", "expired", "cancelling", "cancelled")}
    return Batch(
        id=_id("batch"), tenant_id=sender.tenant_id, project_id=sender.project_id, key_id=sender.key_id, end_user=None,
        endpoint=ENDPOINT, input_file_id=_id("file"), note=None, output_expires_s=None, status="completed",
        closing_as=None, closing_error=None, errors=None, output_file_id=None, error_file_id=None, total=total,
        completed=total - failed, failed=failed, prompt_tokens=400 * total, cached_tokens=100 * total,
        output_tokens=120 * total, available_ms=created_ms, created_ms=created_ms, expires_ms=created_ms + 86_400_000,
        in_progress_ms=created_ms + 2000, finalizing_ms=created_ms + 3_000_000, completed_ms=created_ms + 3_010_000,
        **times,
    )  # fmt: skip


def _alert(at: datetime, number: int) -> Base:
    subject = f"tcp://10.0.0.{number % 200}:5601"
    is_down = number % 2 == 1
    return OperationalAlert(
        id=_id("evt"), condition_id=_id("cnd"), type="engine.down" if is_down else "engine.up",
        status="firing" if is_down else "resolved", severity="critical" if is_down else "info", subject=subject,
        summary=f"Engine {subject} is {'down: the connection was lost' if is_down else 'reached again'}",
        details={"model": MODEL}, at=at,
    )  # fmt: skip

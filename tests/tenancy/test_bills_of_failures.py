"""Billing of failed requests, in the ledger and under quotas: requests that no engine accepted are not billed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import select

from moiety_platform.auth.principal import Principal
from moiety_platform.clock import SystemClock
from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import EngineFailed, EngineRefused, PlatformError, Unavailable
from moiety_platform.inference.quota_reservation import Tariff
from moiety_platform.inference.request_recorder import RequestRecorder
from moiety_platform.metrics import Metrics
from moiety_platform.prices.token_cost import Price
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.kinds import LimitKind, LimitLevel
from moiety_platform.quota.models import Quota, QuotaWindow
from moiety_platform.quota.store import LeaseStore
from moiety_platform.traces.tracing import Tracing
from moiety_platform.usage.models import UsageRecord
from moiety_platform.usage.recorder import UsageRecorder
from moiety_wire.messages import ModelCard

PRINCIPAL = Principal("key", "key", "tenant", "acme", "project", "standard", 1.0, b"salt", frozenset({"inference"}))
REFUSED = EngineRefused("no", upstream_status=401)
AWAY = Unavailable("not there", retry_after_s=1)
BROKEN = EngineFailed("broke off")


@pytest.mark.parametrize(
    ("error", "was_begun", "billed"),
    [(REFUSED, False, (0, 0)), (AWAY, False, (0, 0)), (BROKEN, False, (0, 0)), (BROKEN, True, (40, 7))],
)
async def test_requests_that_no_engine_accepted_are_not_billed_and_release_their_quota(
    database: Database, tmp_path: Path, error: PlatformError, was_begun: bool, billed: tuple[int, int]
) -> None:
    async with database.write() as session:
        quota = Quota(id="q", level=LimitLevel.TENANT, scope_id="tenant", kind=LimitKind.TOKENS_PER_DAY, cap=1000)
        quota.created_at = datetime.now(UTC)
        session.add(quota)
    clock, usage = SystemClock(), UsageRecorder(database, tmp_path / "journal")
    quotas = QuotaEnforcer(database, LeaseStore("replica", 20.0), clock, tick_s=0.05)
    await usage.start()
    await quotas.start()
    recorder = RequestRecorder(usage, quotas, Metrics(), Tracing(), clock)
    opened = recorder.open(
        PRINCIPAL, request_id="r", client_request_id="c", operation="chat", endpoint="/v1", traceparent=None,
        status_of=lambda told: told.status,
    )  # fmt: skip
    with pytest.raises(type(error)), opened as record:
        await record.reservation.begin(40, 1, 30, Tariff({"standard": Price(3, 0, 15)}))
        record.reserved(40)
        record.submitted(FakeEngineClient(ModelCard("e", "m", "f", "{}", "", {}, (), 9, 9, 0, 0, "", "")), "r-0")
        record.output_tokens, record.was_begun = 7 * was_begun, was_begun
        raise error
    await quotas.stop()
    await usage.stop()
    async with database.read() as session:
        (row,) = await session.scalars(select(UsageRecord))
        (window,) = await session.scalars(select(QuotaWindow))
    assert (row.prompt_tokens, row.output_tokens, row.outcome) == (*billed, "failed")
    assert (window.granted, window.settled) == (sum(billed), sum(billed))
    assert (row.cost_nanodollars > 0) == was_begun

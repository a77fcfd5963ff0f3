"""Metrics that a gateway reports about its store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry

from moiety_platform.clock import SystemClock
from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.db.session import Database
from moiety_platform.inference.request_recorder import RequestRecorder
from moiety_platform.metrics import Metrics
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.store import LeaseStore
from moiety_platform.store_metrics import StoreCollector
from moiety_platform.traces.tracing import Tracing
from moiety_platform.usage.metering import MeterReader
from moiety_platform.usage.recorder import UsageRecorder


async def test_a_store_is_told_to_be_ready_though_nobody_asks_for_anything_but_metrics(
    database: Database, tmp_path: Path
) -> None:
    clock, store, usage = SystemClock(), StoreReadiness(database), UsageRecorder(database, tmp_path / "journal")
    quotas = QuotaEnforcer(database, LeaseStore("replica", 20.0), clock)
    requests = RequestRecorder(usage, quotas, Metrics(), Tracing(), clock)
    registry = CollectorRegistry()
    registry.register(StoreCollector(clock, store, usage, quotas, MeterReader(database, usage.holds), requests))
    told = [registry.get_sample_value("moiety_store_ready")]
    async with asyncio.timeout(60):
        while told[-1] != 1:
            await asyncio.sleep(0.01)
            told.append(registry.get_sample_value("moiety_store_ready"))
    assert told[0] == 0, "what nobody has looked at was told"
    await store.close()

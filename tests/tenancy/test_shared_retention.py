"""Retention jobs that find nothing share a transaction, on each database."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.metrics import new_registry
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.retention.jobs import retention_jobs_of
from moiety_platform.retention.metrics import RetentionMetrics
from moiety_platform.retention.service import ObjectJob, RetentionJob, RetentionService
from moiety_platform.settings import GatewaySettings

INTERVAL_S = 60.0


def service_of(
    database: Database,
    jobs: Sequence[RetentionJob | ObjectJob],
    *,
    shared_s: float = math.inf,
    registry: CollectorRegistry | None = None,
) -> RetentionService:
    metrics = RetentionMetrics(registry or new_registry())
    return RetentionService(
        "one", database, jobs, metrics, interval_s=INTERVAL_S, pause_s=0, shared_s=shared_s, now=now_ms
    )


@pytest.mark.parametrize(("shared_s", "num_sessions"), [(math.inf, 1), (-1.0, 4)])
async def test_jobs_that_find_nothing_share_a_transaction_until_it_has_lasted_long(
    database: Database, shared_s: float, num_sessions: int
) -> None:
    sessions: list[AsyncSession] = []

    async def find_nothing(session: AsyncSession) -> int:
        sessions.append(session)
        return 0

    jobs = [RetentionJob(f"job-{number}", find_nothing) for number in range(4)]
    service = service_of(database, jobs, shared_s=shared_s)
    assert await service.round() == {job.name: 0 for job in jobs}
    assert (len(sessions), len({id(one) for one in sessions})) == (4, num_sessions)
    assert await service.round() == {}, "they are done for the interval"


async def test_what_a_job_deletes_in_a_shared_transaction_counts(database: Database) -> None:
    left = [2, 3]

    async def delete_some(_session: AsyncSession) -> int:
        return left.pop() if left else 0

    async def find_nothing(_session: AsyncSession) -> int:
        return 0

    works = {"before": find_nothing, "deleting": delete_some, "after": find_nothing}
    registry = new_registry()
    service = service_of(database, [RetentionJob(*one) for one in works.items()], registry=registry)
    assert await service.round() == {"before": 0, "deleting": 5, "after": 0}
    page = generate_latest(registry).decode()
    assert 'moiety_retention_rows_total{retention_job="deleting"} 5.0' in page


async def test_an_idle_round_needs_few_statements(database: Database, objects: ObjectStore) -> None:
    ahead_s = [0.0]

    def now() -> ColumnElement[int]:
        return now_ms() + round(ahead_s[0] * 1000)

    jobs = retention_jobs_of(GatewaySettings(), database, objects, now)
    service = service_of(database, jobs)
    service.now = now
    await service.round()
    ahead_s[0] = INTERVAL_S + 1
    before = database.num_statements
    done = await service.round()
    assert set(done.values()) == {0}
    assert database.num_statements - before < 5 * len(done), "one by one, the jobs need six each"

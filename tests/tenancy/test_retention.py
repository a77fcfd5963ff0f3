"""Retention jobs, on each database: they delete expired rows only, and several gateways share the work."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import generate_latest
from sqlalchemy import ColumnElement, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from tests.usage_rows import make_row

from moiety_platform.adapters.models import Adapter, AdapterChunk, AdapterState
from moiety_platform.agent_runs.models import AgentRun
from moiety_platform.agent_runs.store import join_run
from moiety_platform.agent_runs.terms import RunTerms
from moiety_platform.alerts.models import OperationalAlert
from moiety_platform.batches.models import Batch, BatchLine, BatchStatus, LineState
from moiety_platform.batches.purge import LINES_AT_ONCE, purge_batches
from moiety_platform.batches.results import LINES_AT_ONCE as ANSWERS_AT_ONCE
from moiety_platform.batches.results import BatchFiles
from moiety_platform.db.base import Base
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.files.contents import FileContents
from moiety_platform.files.models import FileChunk, FileState, StoredFile
from moiety_platform.idempotency.models import IdempotencyTenant, IdempotentRequest, State
from moiety_platform.metrics import new_registry
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.quota.kinds import ALWAYS
from moiety_platform.quota.models import (
    LeaseState,
    Quota,
    QuotaAlert,
    QuotaLease,
    QuotaRate,
    QuotaWindow,
)
from moiety_platform.responses_api.models import StoredConversation, StoredResponse
from moiety_platform.retention.jobs import DAY_MS, retention_jobs_of
from moiety_platform.retention.leases import claim_job
from moiety_platform.retention.metrics import RetentionMetrics
from moiety_platform.retention.models import RetentionJobRecord
from moiety_platform.retention.service import LEASE_S, ObjectJob, RetentionJob, RetentionService
from moiety_platform.settings import GatewaySettings
from moiety_platform.simulations.models import SimulationRecord
from moiety_platform.usage.models import LedgerEntry, UsageCut, UsageHour, UsageRecord
from moiety_platform.usage.reconciliation import reconcile
from moiety_platform.usage.store import insert_rows
from moiety_platform.webhooks.models import DeliveryState, Webhook, WebhookDelivery

NOW = datetime.now(UTC)
NOW_MS = round(NOW.timestamp() * 1000)
INTERVAL_S = 60.0
OLD, NEW = 400, 1  # days ago


class StoreClock:
    """The database's clock, which may be put ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> ColumnElement[int]:
        return now_ms() + round(self.ahead_s * 1000)


@pytest.fixture
def store_clock() -> StoreClock:
    return StoreClock()


def upkeep_of(
    database: Database,
    owner: str,
    now: StoreClock,
    objects: ObjectStore,
    jobs: list[RetentionJob | ObjectJob] | None = None,
) -> RetentionService:
    chosen = jobs if jobs is not None else retention_jobs_of(GatewaySettings(), database, objects, now)
    return RetentionService(
        owner, database, chosen, RetentionMetrics(new_registry()), interval_s=INTERVAL_S, pause_s=0, now=now
    )


def file_of(name: str, days: int, **changes: Any) -> StoredFile:
    moment = NOW_MS - days * DAY_MS
    values = {"expires_ms": moment + 30 * DAY_MS, "batch_id": None, "line_state": None, **changes}
    return StoredFile(
        id=name, tenant_id="t", project_id="p", purpose="batch", filename="f", state=FileState.READY, num_bytes=2,
        created_ms=moment, touched_ms=moment, **values,
    )  # fmt: skip


def batch_of(name: str, days: int, **changes: Any) -> Batch:
    zeros = dict.fromkeys(("completed", "failed", "prompt_tokens", "cached_tokens", "output_tokens"), 0)
    values = {"status": BatchStatus.COMPLETED, "input_file_id": f"in-{name}", "total": 3, **zeros, **changes}
    return Batch(
        id=name, tenant_id="t", project_id="p", key_id="k", endpoint="/v1/completions", available_ms=0,
        created_ms=NOW_MS - days * DAY_MS, expires_ms=NOW_MS - (days - 1) * DAY_MS, **values,
    )  # fmt: skip


def lines_of(batch_id: str, count: int, answer: bytes | None = None) -> list[BatchLine]:
    return [
        BatchLine(batch_id=batch_id, number=number, custom_id=f"{number}", start=0, num_bytes=1,
                  state=LineState.COMPLETED, available_ms=0, num_refusals=0, num_failures=0, answer=answer,
                  answer_bytes=2)
        for number in range(1, count + 1)
    ]  # fmt: skip


def limits_of(name: str, days: int) -> list[Base]:
    """A window with two leases, an alert, and its deliveries to webhooks: one that was given up, one that waits."""
    start = (NOW - timedelta(days=days)).replace(hour=0, minute=0, second=0, microsecond=0)
    window = QuotaWindow(quota_id=name, start=start, granted=9, settled=7)
    leases = [
        QuotaLease(quota_id=name, start=start, replica_id=replica, granted=granted, settled=settled, expires_ms=0,
                   state=LeaseState.QUARANTINED)
        for replica, granted, settled in (("a", 5, 5), ("b", 4, 2))
    ]  # fmt: skip
    alerts = [
        QuotaAlert(quota_id=name, start=start, percent=percent, id=f"{name}-{percent}", tenant_id="t", level="tenant",
                   scope_id="t", kind="tokens_per_day", cap=10, used=7, at=start)
        for percent in (50, 60)
    ]  # fmt: skip
    deliveries = [
        WebhookDelivery(webhook_id="w", alert_id=f"{name}-{percent}", state=state, num_tries=1,
                        available_ms=NOW_MS - days * DAY_MS)
        for percent, state in ((50, DeliveryState.DEAD), (60, DeliveryState.PENDING))
    ]  # fmt: skip
    return [window, *leases, *alerts, *deliveries]


def key_of(name: str, expires_ms: int) -> IdempotentRequest:
    return IdempotentRequest(
        tenant_id="t", key_hash=name.encode(), fingerprint=b"f", claim_id=name, state=State.KEPT,
        expires_ms=expires_ms, num_bytes=1, status=200, headers={}, body=b"x",
    )  # fmt: skip


def response_of(name: str, expires_ms: int) -> StoredResponse:
    counts = {"num_items": 1, "num_bytes": 4, "total_bytes": 4}
    whose = {"tenant_id": "t", "project_id": "p", "model": "m"}
    return StoredResponse(id=name, **whose, **counts, expires_ms=expires_ms, items=b"[]", body=b"{}")


def conversation_of(name: str, expires_ms: int) -> StoredConversation:
    whose = {"tenant_id": "t", "project_id": "p", "models": "[]", "labels": "{}"}
    counts = {"next_position": 0, "num_items": 0, "num_bytes": 2, "created_ms": 0}
    return StoredConversation(id=name, **whose, **counts, expires_ms=expires_ms)


def simulation_of(name: str, created_ms: int) -> SimulationRecord:
    return SimulationRecord(id=name, state="done", created_ms=created_ms, alive_ms=created_ms, settings={})


def adapter_of(name: str, state: AdapterState, touched_ms: int) -> Adapter:
    return Adapter(
        id=name, tenant_id="t", model="m", name=name, state=state, config="{}", num_bytes=2, created_ms=touched_ms,
        touched_ms=touched_ms,
    )  # fmt: skip


def alert_of(name: str, days: int) -> OperationalAlert:
    return OperationalAlert(
        id=name, condition_id="c", type="engine.down", status="firing", severity="critical", subject="e", summary="s",
        details={}, at=NOW - timedelta(days=days),
    )  # fmt: skip


async def fill(database: Database) -> None:
    """Old things of every kind, beside the same that are new, or old and still needed."""
    quota = Quota(id="open", level="tenant", scope_id="t", kind="concurrent_requests", cap=5, created_at=NOW)
    async with database.write() as session:
        session.add_all([key_of("old", NOW_MS - 1), key_of("new", NOW_MS + DAY_MS)])
        session.add_all([response_of("old", NOW_MS - 1), response_of("new", NOW_MS + DAY_MS)])
        session.add_all([conversation_of("old", NOW_MS - 1), conversation_of("new", NOW_MS + DAY_MS)])
        session.add(IdempotencyTenant(tenant_id="t", num_keys=2, num_bytes=2))
        session.add_all([file_of("in-old", OLD), file_of("in-new", NEW), file_of("in-open", OLD)])
        session.add_all(FileChunk(file_id=f"in-{n}", start=0, stop=2, data=b"{}") for n in ("old", "new", "open"))
        session.add(file_of("out-kept", OLD, expires_ms=None, batch_id="kept", line_state=LineState.COMPLETED))
        session.add(file_of("out-old", OLD, batch_id="old", line_state=LineState.COMPLETED))
        session.add_all([batch_of("old", OLD, output_file_id="out-old"), batch_of("new", NEW)])
        session.add_all([batch_of("kept", OLD, output_file_id="out-kept"), batch_of("refused", OLD)])
        session.add(batch_of("open", OLD, status=BatchStatus.IN_PROGRESS))
        for name in ("old", "new", "kept", "open"):
            session.add_all(lines_of(name, 3, b"{}"))
        session.add_all([*limits_of("old", OLD), *limits_of("new", NEW), quota])
        session.add_all([simulation_of("old", NOW_MS - DAY_MS - 1), simulation_of("new", NOW_MS - DAY_MS // 2)])
        adapters = {
            "gone": (AdapterState.DELETED, NOW_MS),
            "broken-off": (AdapterState.UPLOADING, NOW_MS - DAY_MS),
            "coming": (AdapterState.UPLOADING, NOW_MS),
            "ready": (AdapterState.READY, NOW_MS - OLD * DAY_MS),
        }
        session.add_all(adapter_of(name, *fields) for name, fields in adapters.items())
        session.add_all(AdapterChunk(adapter_id=name, start=0, data=b"xx") for name in adapters)
        session.add(Webhook(id="w", url="https://example.com", created_at=NOW))
        session.add_all([alert_of("alert-old", OLD), alert_of("alert-new", NEW), alert_of("alert-waits", OLD)])
        waits = {"webhook_id": "w", "alert_id": "alert-waits", "state": DeliveryState.PENDING}
        session.add(WebhookDelivery(**waits, num_tries=1, available_ms=NOW_MS - OLD * DAY_MS))
        session.add_all(QuotaRate(quota_id=name, debt=0, at_ms=0) for name in ("open", "deleted"))
        session.add_all(QuotaWindow(quota_id=name, start=ALWAYS, granted=0, settled=0) for name in ("open", "deleted"))
    async with database.write() as session:
        await insert_rows(session, [make_row("r", started_at=NOW - timedelta(days=OLD))])


async def left(database: Database, *columns: Any) -> set[Any]:
    async with database.read() as session:
        rows = [tuple(row) for row in await session.execute(select(*columns))]
    return {row[0] for row in rows} if len(columns) == 1 else set(rows)


async def content_of(objects: ObjectStore, key: str) -> bytes:
    return await objects.read_range(key, 0, 1000)


async def test_only_expired_rows_are_deleted(database: Database, store_clock: StoreClock, objects: ObjectStore) -> None:
    await fill(database)
    async with database.write() as session:
        for name, days in (("old", OLD), ("new", NEW)):
            began_at = NOW - timedelta(days=days)
            await join_run(session, "t", RunTerms(name), began_at=began_at, now=began_at)
    done = await upkeep_of(database, "one", store_clock, objects).round()
    assert done.pop("usage_days") >= OLD - NEW - 1, "of the old request, and those after it that had none"
    assert done.pop("usage_attributed_sums") > OLD - NEW - 1, "the old request's, and the marks of those days"
    assert done == {
        "file_contents": 2 + 2 + 1,  # two files, their chunks, and one whose answers are not what they were
        "adapter_contents": 1 + 1,  # one, and its part
        "request_contents": 0,
        "orphaned_objects": 0,
        "idempotent_requests": 1,
        "files_without_end": 1,
        "responses": 1,
        "conversations": 1,
        "files": 2 + 4,  # a file and its chunk; a file and the three answers that it was made of
        "batches": 3 + 1 + 1,
        "webhook_deliveries": 1,
        "operational_alerts": 1,
        "quota_windows": 1 + 3,
        "forsaken_limits": 2,
        "usage_minutes": 1,
        "simulations": 1,
        "agent_runs": 1,
        "adapters": 2 + 2,  # each and its part
    }
    assert await left(database, Adapter.id) == {"coming", "ready"}
    assert await left(database, AdapterChunk.adapter_id) == {"coming"}
    assert await left(database, SimulationRecord.id) == {"new"}
    assert await left(database, AgentRun.name) == {"new"}
    assert await left(database, IdempotentRequest.claim_id) == {"new"}
    assert await left(database, StoredResponse.id) == {"new"}
    assert await left(database, StoredConversation.id) == {"new"}
    assert await left(database, StoredFile.id) == {"in-new", "in-open", "out-kept"}
    assert await left(database, FileChunk.file_id) == set()
    assert await content_of(objects, "files/t/in-open") == b"{}"
    assert await left(database, Batch.id) == await left(database, BatchLine.batch_id) == {"new", "kept", "open"}
    assert None not in await left(database, BatchLine.answer)
    assert await left(database, QuotaWindow.quota_id) == {"new", "open"}
    assert await left(database, QuotaLease.quota_id) == {"new"}
    assert await left(database, QuotaAlert.id) == {"new-50", "new-60", "old-60"}
    assert await left(database, WebhookDelivery.alert_id) == {"new-50", "new-60", "old-60", "alert-waits"}
    assert await left(database, OperationalAlert.id) == {"alert-new", "alert-waits"}
    assert await left(database, QuotaRate.quota_id) == {"open"}
    for table in (UsageRecord, LedgerEntry, UsageHour):
        assert len(await left(database, *table.__table__.primary_key)) == 1
    async with database.read() as session:
        assert (await reconcile(session, NOW - timedelta(days=500), NOW)).agrees


async def test_requests_may_go_and_what_they_came_to_stays_provable(
    database: Database, store_clock: StoreClock, objects: ObjectStore
) -> None:
    old = NOW - timedelta(days=OLD)
    rows = [
        make_row(f"r{number}", tenant_id=f"ten_{number % 2}", started_at=old + timedelta(minutes=7 * number),
                 cost_nanodollars=number)
        for number in range(20)
    ]  # fmt: skip
    new = make_row("new", started_at=NOW)
    jobs = retention_jobs_of(GatewaySettings(keep_requests_days=62), database, objects, store_clock)
    since = NOW - timedelta(days=500)
    async with database.write() as session:
        await insert_rows(session, [*rows, new])
    async with database.read() as session:
        before = await reconcile(session, since, NOW)
    unheard = make_row("late", tenant_id="ten_9", started_at=old)
    for late, num_cut in (([], 20), ([rows[3]], 0), ([rows[5], unheard], 1), ([rows[3], new], 0)):
        async with database.write() as session:
            await insert_rows(session, late)
        assert (await upkeep_of(database, "one", store_clock, objects, jobs).round())["usage"] == num_cut
        assert await left(database, UsageRecord.request_id) == {"new"}
        async with database.read() as session:
            found = await reconcile(session, since, NOW)
        assert found.agrees
        store_clock.ahead_s += INTERVAL_S + 1
    assert (before.total.requests, found.total.requests) == (21, 22)
    assert len(await left(database, LedgerEntry.request_id)) == 22
    async with database.write() as session:
        await session.execute(update(UsageCut).where(UsageCut.tenant_id == "ten_1").values(output_tokens=0))
    async with database.read() as session:
        found = await reconcile(session, since, NOW)
    assert [one.tenant_id for one in found.differences] == ["ten_1"]


async def test_a_file_without_an_end_gets_one_and_goes_then(
    database: Database, store_clock: StoreClock, objects: ObjectStore
) -> None:
    await fill(database)
    await upkeep_of(database, "one", store_clock, objects).round()
    store_clock.ahead_s += 30 * 86_400 + INTERVAL_S
    await upkeep_of(database, "one", store_clock, objects).round()
    assert await left(database, StoredFile.id) == {"in-open"}
    assert await left(database, Batch.id) == {"open"}


async def test_gateways_that_look_at_once_do_each_chore_once(
    database: Database, second: Database, store_clock: StoreClock, objects: ObjectStore
) -> None:
    async with database.write() as session:
        session.add_all(key_of(f"{number}", NOW_MS - 1) for number in range(450))
        session.add(IdempotencyTenant(tenant_id="t", num_keys=450, num_bytes=450))
        session.add_all(file_of(f"{number}", OLD) for number in range(40))
    gateways = [upkeep_of((database, second)[n % 2], f"gateway-{n}", store_clock, objects) for n in range(6)]
    async with asyncio.TaskGroup() as group:  # which ends the others, and their connections, if one fails
        tasks = [group.create_task(gateway.round()) for gateway in gateways]
    rounds = [task.result() for task in tasks]
    assert [sum(done.get(name, 0) for done in rounds) for name in ("idempotent_requests", "files")] == [450, 40]
    assert sum(bool(done.get("idempotent_requests")) for done in rounds) == 1
    assert await left(database, IdempotencyTenant.tenant_id) == set()
    assert await gateways[0].round() == {}  # until the interval is over
    store_clock.ahead_s += INTERVAL_S + 1
    assert set((await gateways[0].round()).values()) == {0}


async def test_another_gateway_takes_over_retention_after_the_lease_of_a_killed_one(
    database: Database, store_clock: StoreClock, objects: ObjectStore
) -> None:
    await fill(database)
    async with database.write() as session:
        assert await claim_job(session, "batches", "killed", round(LEASE_S * 1000), store_clock)
    other = upkeep_of(database, "other", store_clock, objects)
    assert "batches" not in await other.round()
    store_clock.ahead_s += LEASE_S + 1
    assert (await other.round())["batches"] > 0
    assert await left(database, RetentionJobRecord.owner) == {None}


async def test_a_large_batch_is_deleted_in_pieces(database: Database, store_clock: StoreClock) -> None:
    async with database.write() as session:
        session.add(batch_of("large", OLD))
        session.add_all(lines_of("large", LINES_AT_ONCE + 7))
    sizes = []
    for _ in range(4):
        async with database.write() as session:
            sizes.append(await purge_batches(session, keep_ms=30 * DAY_MS, now=store_clock))
    assert sizes == [LINES_AT_ONCE, 7, 1, 0]


async def test_the_answers_of_a_deleted_file_go_in_pieces_whichever_gateway_is_at_it(
    database: Database, store_clock: StoreClock, objects: ObjectStore
) -> None:
    async with database.write() as session:
        session.add_all([batch_of("b", NEW), file_of("out", OLD, batch_id="b", line_state=LineState.COMPLETED)])
        session.add_all(lines_of("b", 2 * ANSWERS_AT_ONCE + 7, b"{}"))
    gateways = [FileContents(database, objects, BatchFiles(database), store_clock) for _ in range(2)]
    sizes = [await gateways[turn].purge() for turn in (0, 1, 0, 1, 0)]
    assert sizes == [ANSWERS_AT_ONCE, ANSWERS_AT_ONCE, 7, 1, 0]
    assert await left(database, BatchLine.answer) == {None}


async def test_a_chore_that_fails_keeps_no_other_from_being_done_and_is_told(
    database: Database, store_clock: StoreClock, objects: ObjectStore
) -> None:
    async def fail(session: AsyncSession) -> int:
        await session.execute(update(QuotaRate).values(debt=1))
        raise LookupError("a defect")

    await fill(database)
    registry = new_registry()
    jobs = [RetentionJob("broken", fail), *retention_jobs_of(GatewaySettings(), database, objects, store_clock)]
    retention = RetentionService(
        "one", database, jobs, RetentionMetrics(registry), interval_s=INTERVAL_S, now=store_clock
    )
    assert (await retention.round())["batches"] > 0
    assert await left(database, QuotaRate.debt) == {0}
    page = generate_latest(registry).decode()
    assert 'moiety_retention_failures_total{retention_job="broken"} 1.0' in page
    assert 'moiety_retention_rows_total{retention_job="quota_windows"} 4.0' in page


async def test_a_service_that_runs_does_its_chores_by_itself_and_stops(
    database: Database, objects: ObjectStore
) -> None:
    await fill(database)
    jobs = retention_jobs_of(GatewaySettings(), database, objects)
    retention = RetentionService("one", database, jobs, RetentionMetrics(new_registry()), interval_s=0.04, pause_s=0)
    await retention.start()
    async with asyncio.timeout(60):
        while await left(database, QuotaRate.quota_id) != {"open"}:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)
    await retention.stop()
    assert await left(database, Batch.id) == {"new", "kept", "open"}
    assert await left(database, QuotaRate.quota_id) == {"open"}

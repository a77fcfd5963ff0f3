"""The work of periodic tasks follows the database, and is read once for all tasks that ask together."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from moiety_platform.alert_watch.watch import AlertThresholds, AlertWatch
from moiety_platform.alerts.models import AlertCondition
from moiety_platform.batches.models import Batch, BatchStatus
from moiety_platform.bootstrap.pending_work import PendingWork, PendingWorkReader
from moiety_platform.clock import ManualClock
from moiety_platform.db.base import Base
from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import Unavailable
from moiety_platform.quota.models import QuotaThreshold
from moiety_platform.tenant_deletion.engine_notice import EngineNotice
from moiety_platform.tenants.models import Tenant, TenantDeletion
from moiety_platform.webhooks.addresses import AddressPolicy
from moiety_platform.webhooks.models import DeliveryState, WebhookDelivery
from moiety_platform.webhooks.sender import AlertSender
from moiety_platform.webhooks.webhook_client import WebhookClient

from .conftest import CuttableStore

NONE = PendingWork(0, has_open_batches=False, has_thresholds=False, has_pending_deliveries=False, has_conditions=False)
NOW = datetime.now(UTC)


def batch_of(status: BatchStatus) -> Batch:
    zeros = dict.fromkeys(("completed", "failed", "prompt_tokens", "cached_tokens", "output_tokens"), 0)
    return Batch(
        id=f"batch-{status}", tenant_id="t", project_id="p", key_id="k", endpoint="/v1/completions", available_ms=0,
        created_ms=0, expires_ms=1, status=status, input_file_id="f", total=1, **zeros,
    )  # fmt: skip


def delivery_of(state: DeliveryState) -> WebhookDelivery:
    return WebhookDelivery(webhook_id="w", alert_id=f"a-{state}", state=state, num_tries=0, available_ms=2**50)


def tenant_of(name: str) -> Tenant:
    return Tenant(id=name, name=name, service_class="standard", weight=1.0, status="active", created_at=NOW)


async def add(database: Database, *rows: Base) -> None:
    async with database.write() as session:
        session.add_all(rows)


async def test_each_kind_of_work_follows_its_rows(database: Database) -> None:
    pending_work = PendingWorkReader(database)
    await add(database, batch_of(BatchStatus.COMPLETED), delivery_of(DeliveryState.DEAD))
    assert await pending_work.read() == NONE
    assert not await pending_work.has_open_batches()
    assert not await pending_work.may_have_alerts()
    await add(database, batch_of(BatchStatus.CANCELLING))
    assert await pending_work.has_open_batches()
    await add(database, QuotaThreshold(quota_id="q", percent=80))
    assert await pending_work.may_have_alerts()
    await add(database, delivery_of(DeliveryState.PENDING))
    found = await pending_work.read()
    assert (found.has_thresholds, found.has_pending_deliveries, found.has_conditions) == (True, True, False)


async def test_those_who_ask_in_one_wake_up_share_a_statement(database: Database) -> None:
    pending_work = PendingWorkReader(database)
    await pending_work.read()
    before = database.num_statements
    await pending_work.read()
    of_one = database.num_statements - before
    asked = [
        pending_work.has_open_batches(),
        pending_work.may_have_alerts(),
        pending_work.has_conditions(),
        pending_work.num_deletions(),
    ]
    assert await asyncio.gather(*asked) == [False, False, False, 0]
    assert database.num_statements - before == 2 * of_one
    await pending_work.stop()


async def test_what_was_committed_before_the_question_is_in_the_answer(database: Database) -> None:
    pending_work = PendingWorkReader(database)
    for number in range(5):
        asked = asyncio.create_task(pending_work.num_deletions())  # an answer that may be older
        await add(database, tenant_of(f"t{number}"))
        await add(database, TenantDeletion(tenant_id=f"t{number}", begun_at=NOW, counts={}))
        assert await pending_work.num_deletions() == number + 1
        assert await asked in (number, number + 1)
    await pending_work.stop()


async def test_a_caller_that_gives_up_takes_the_answer_from_no_other(database: Database) -> None:
    pending_work = PendingWorkReader(database)
    first, second = asyncio.create_task(pending_work.read()), asyncio.create_task(pending_work.read())
    await asyncio.sleep(0)
    first.cancel()
    assert await second == NONE
    with pytest.raises(asyncio.CancelledError):
        await first
    await pending_work.stop()


async def test_an_outage_reaches_all_who_ask_and_ends(cuttable: CuttableStore) -> None:
    pending_work = PendingWorkReader(cuttable.database)
    assert await pending_work.read() == NONE
    await cuttable.wire.cut()
    asked = [pending_work.has_open_batches(), pending_work.has_conditions()]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, Unavailable) for one in found)
    await cuttable.wire.mend()
    assert await pending_work.read() == NONE
    await pending_work.stop()


async def test_rounds_without_work_need_one_transaction_together(
    database: Database, clock: ManualClock, tmp_path: Path
) -> None:
    pending_work, engine = PendingWorkReader(database), FakeEngineClient(None)
    thresholds = AlertThresholds(engine_down_s=30, disk_free_percent=0, slo_burn_rate=0)
    watch = AlertWatch(database, list, tmp_path, clock, thresholds, has_conditions=pending_work.has_conditions)
    notice = EngineNotice(database, lambda: [engine], count_deletions=pending_work.num_deletions)
    async with WebhookClient(AddressPolicy()) as poster:
        sender = AlertSender(database, poster, b"pepper", clock, may_have_alerts=pending_work.may_have_alerts)

        async def rounds() -> int:
            before = database.num_statements
            await asyncio.gather(watch.round(), notice.round(), sender.round())
            return database.num_statements - before

        await rounds()  # the first one also reads SLOs
        before = database.num_statements
        await pending_work.read()
        of_one = database.num_statements - before
        assert await rounds() == of_one
        await add(database, AlertCondition(
            id="c", kind="disk", subject="d", state="firing", since_ms=0, seen_ms=0
        ))  # fmt: skip
        assert await rounds() > of_one
    await pending_work.stop()

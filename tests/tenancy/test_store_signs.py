"""Signs that periodic tasks have something to do: they follow the database, and are read once for all who ask."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from moiety_platform.alert_watch.watch import AlertThresholds, AlertWatch
from moiety_platform.alerts.models import AlertCondition
from moiety_platform.batches.models import Batch, BatchStatus
from moiety_platform.bootstrap.store_signs import Signs, StoreSigns
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

NONE = Signs(0, has_open_batches=False, has_thresholds=False, has_pending_deliveries=False, has_conditions=False)
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


async def test_each_sign_follows_its_rows(database: Database) -> None:
    signs = StoreSigns(database)
    await add(database, batch_of(BatchStatus.COMPLETED), delivery_of(DeliveryState.DEAD))
    assert await signs.read() == NONE
    assert not await signs.has_open_batches()
    assert not await signs.may_have_alerts()
    await add(database, batch_of(BatchStatus.CANCELLING))
    assert await signs.has_open_batches()
    await add(database, QuotaThreshold(quota_id="q", percent=80))
    assert await signs.may_have_alerts()
    await add(database, delivery_of(DeliveryState.PENDING))
    found = await signs.read()
    assert (found.has_thresholds, found.has_pending_deliveries, found.has_conditions) == (True, True, False)


async def test_those_who_ask_in_one_wake_up_share_a_statement(database: Database) -> None:
    signs = StoreSigns(database)
    await signs.read()
    before = database.num_statements
    await signs.read()
    of_one = database.num_statements - before
    asked = [signs.has_open_batches(), signs.may_have_alerts(), signs.has_conditions(), signs.num_deletions()]
    assert await asyncio.gather(*asked) == [False, False, False, 0]
    assert database.num_statements - before == 2 * of_one
    await signs.stop()


async def test_what_was_committed_before_the_question_is_in_the_answer(database: Database) -> None:
    signs = StoreSigns(database)
    for number in range(5):
        asked = asyncio.create_task(signs.num_deletions())  # an answer that may be older
        await add(database, tenant_of(f"t{number}"))
        await add(database, TenantDeletion(tenant_id=f"t{number}", begun_at=NOW, counts={}))
        assert await signs.num_deletions() == number + 1
        assert await asked in (number, number + 1)
    await signs.stop()


async def test_a_caller_that_gives_up_takes_the_answer_from_no_other(database: Database) -> None:
    signs = StoreSigns(database)
    first, second = asyncio.create_task(signs.read()), asyncio.create_task(signs.read())
    await asyncio.sleep(0)
    first.cancel()
    assert await second == NONE
    with pytest.raises(asyncio.CancelledError):
        await first
    await signs.stop()


async def test_an_outage_reaches_all_who_ask_and_ends(cuttable: CuttableStore) -> None:
    signs = StoreSigns(cuttable.database)
    assert await signs.read() == NONE
    await cuttable.wire.cut()
    asked = [signs.has_open_batches(), signs.has_conditions()]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, Unavailable) for one in found)
    await cuttable.wire.mend()
    assert await signs.read() == NONE
    await signs.stop()


async def test_rounds_without_signs_need_one_transaction_together(
    database: Database, clock: ManualClock, tmp_path: Path
) -> None:
    signs, engine = StoreSigns(database), FakeEngineClient(None)
    thresholds = AlertThresholds(engine_down_s=30, disk_free_percent=0, slo_burn_rate=0)
    watch = AlertWatch(database, list, tmp_path, clock, thresholds, has_conditions=signs.has_conditions)
    notice = EngineNotice(database, lambda: [engine], count_deletions=signs.num_deletions)
    async with WebhookClient(AddressPolicy()) as poster:
        sender = AlertSender(database, poster, b"pepper", clock, may_have_alerts=signs.may_have_alerts)

        async def rounds() -> int:
            before = database.num_statements
            await asyncio.gather(watch.round(), notice.round(), sender.round())
            return database.num_statements - before

        await rounds()  # the first one also reads SLOs
        before = database.num_statements
        await signs.read()
        of_one = database.num_statements - before
        assert await rounds() == of_one
        await add(database, AlertCondition(
            id="c", kind="disk", subject="d", state="firing", since_ms=0, seen_ms=0
        ))  # fmt: skip
        assert await rounds() > of_one
    await signs.stop()

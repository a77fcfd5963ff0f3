"""Quota alerts: each threshold is sent once per window, signed, and only to addresses that webhooks may reach."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from ipaddress import ip_address, ip_network
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update
from tests.usage_rows import make_row
from tests.webhook_receivers import Receiver

from moiety_platform.backoff import Backoff
from moiety_platform.bootstrap.pending_work import PendingWorkReader
from moiety_platform.clock import ManualClock
from moiety_platform.controllers import with_services
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.kinds import LimitLevel, Scope, Unit
from moiety_platform.quota.models import QuotaAlert
from moiety_platform.quota.store import LeaseStore
from moiety_platform.usage.store import insert_rows
from moiety_platform.webhooks.addresses import AddressPolicy, CannotReach
from moiety_platform.webhooks.controller import WebhookController
from moiety_platform.webhooks.deliveries import MAX_PENDING, MAX_TRIES, enqueue
from moiety_platform.webhooks.models import DeliveryState, WebhookDelivery
from moiety_platform.webhooks.sender import AlertSender
from moiety_platform.webhooks.special_addresses import is_special
from moiety_platform.webhooks.terms import EventGroup
from moiety_platform.webhooks.tester import WebhookTester
from moiety_platform.webhooks.webhook_client import WebhookClient

from .conftest import PEPPER, Admin, Demo, admin_app

LOOPBACK = AddressPolicy((ip_network("127.0.0.0/8"),))
AT_ONCE = Backoff(first_s=0.0, max_s=0.0)


@pytest.fixture
async def enforcer(database: Database, clock: ManualClock) -> AsyncIterator[QuotaEnforcer]:
    made = QuotaEnforcer(database, LeaseStore("gateway", 20.0), clock, tick_s=0.05)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def admin(database: Database, clock: ManualClock, demo: Demo, enforcer: QuotaEnforcer) -> AsyncIterator[Admin]:
    async with WebhookClient(LOOPBACK) as poster:
        tester = WebhookTester(poster, [PEPPER], clock)
        routes = with_services(WebhookController, reach=LOOPBACK, tester=tester)
        client = Admin(admin_app(database, clock, quotas=enforcer, more=[routes]), demo.admin_key)
        async with client.http:
            yield client


@pytest.fixture
async def new_sender(database: Database, clock: ManualClock) -> AsyncIterator[Callable[..., AlertSender]]:
    """Return a function that makes the sender of a further gateway."""
    async with AsyncExitStack() as stack:
        posters = [await stack.enter_async_context(WebhookClient(LOOPBACK, timeout_s=5.0)) for _ in range(3)]

        def make(**options: Any) -> AlertSender:
            pending_work = {"may_have_alerts": PendingWorkReader(database).may_have_alerts}
            return AlertSender(
                database, posters.pop(), PEPPER, clock, **{"backoff": AT_ONCE, **pending_work, **options}
            )

        yield make


@pytest.fixture
def use(database: Database, clock: ManualClock, demo: Demo, enforcer: QuotaEnforcer) -> Any:
    """`await use(tokens)`: a request of the tenant that came to so many tokens, booked as a gateway books it."""
    numbers = iter(range(1_000))

    async def spend(tokens: int) -> None:
        hold = await enforcer.hold([Scope(LimitLevel.TENANT, demo.tenant_id)], {Unit.TOKENS: tokens})
        charges = hold.settle({Unit.TOKENS: tokens})
        row = make_row(f"r-{next(numbers)}", tenant_id=demo.tenant_id, started_at=clock.now(), charges=charges)
        async with database.write() as session:
            await insert_rows(session, [row])

    return spend


async def set_limit(admin: Admin, demo: Demo, **fields: Any) -> Any:
    limit = {"level": "tenant", "scope_id": demo.tenant_id, "kind": "tokens_per_day", "cap": 1000, **fields}
    return await admin.call("PUT", "quotas", 200, json=limit)


async def add_webhook(admin: Admin, url: str) -> Any:
    return await admin.call("POST", "webhooks", 201, json={"url": url})


async def drain(sender: AlertSender) -> None:
    while await sender.round():
        pass


async def test_each_threshold_is_sent_once_per_window_and_signed(
    admin: Admin, demo: Demo, receiver: Receiver, new_sender: Any, use: Any, clock: ManualClock
) -> None:
    secret = (await add_webhook(admin, receiver.url))["secret"]
    limit = await set_limit(admin, demo, alert_at=[80, 50, 100])
    assert (limit["alert_at"], limit["alerted"]) == ([50, 80, 100], [])
    sender = new_sender()
    await use(499)
    assert not await sender.round()
    await use(1)
    await drain(sender)
    await use(100)
    await drain(sender)
    (event,) = receiver.events(secret)
    assert event.pop("id").startswith("evt_")
    assert event == {
        "type": "quota.threshold", "at": "2026-01-01T00:00:00Z", "tenant_id": demo.tenant_id, "level": "tenant",
        "scope_id": demo.tenant_id, "quota_id": limit["id"], "kind": "tokens_per_day", "cap": 1000, "used": 500,
        "threshold": 50, "window_start": "2026-01-01T00:00:00Z", "window_end": "2026-01-02T00:00:00Z",
    }  # fmt: skip
    await use(400)
    await drain(sender)
    assert sorted(event["threshold"] for event in receiver.events(secret)) == [50, 80, 100]
    (shown,) = (await admin.call("GET", "quotas", 200))["data"]
    assert (shown["alert_at"], shown["alerted"]) == ([50, 80, 100], [50, 80, 100])
    clock.advance(24 * 3600)
    (shown,) = (await admin.call("GET", "quotas", 200))["data"]
    assert shown["alerted"] == []
    await use(600)
    await drain(sender)
    assert [event["window_start"][:10] for event in receiver.events(secret)][3:] == ["2026-01-02"]


async def test_gateways_that_look_at_the_same_time_tell_each_webhook_once(
    admin: Admin, demo: Demo, receiver: Receiver, new_sender: Any, use: Any, database: Database
) -> None:
    hooks = [await add_webhook(admin, f"{receiver.url}/{number}") for number in range(2)]
    await set_limit(admin, demo, alert_at=[10, 20, 30])
    await use(999)
    senders = [new_sender(interval_s=0.01), new_sender(interval_s=0.01)]
    for sender in senders:
        await sender.start()
    async with asyncio.timeout(60):
        for _ in range(6):
            await receiver.arrived.get()
    for sender in senders:
        await sender.stop()
    told = sorted(json.loads(body)["threshold"] for _, body in receiver.got)
    assert told == [10, 10, 20, 20, 30, 30]
    assert len({json.loads(body)["id"] for _, body in receiver.got}) == 3
    assert hooks[0]["secret"] != hooks[1]["secret"]
    async with database.read() as session:
        assert len((await session.scalars(select(QuotaAlert))).all()) == 3
        assert (await session.scalars(select(WebhookDelivery))).all() == []


async def test_a_receiver_that_is_away_gets_the_same_event_when_it_is_back(
    admin: Admin, demo: Demo, receiver: Receiver, new_sender: Any, use: Any
) -> None:
    secret = (await add_webhook(admin, receiver.url))["secret"]
    await set_limit(admin, demo, alert_at=[50])
    sender = new_sender()
    receiver.away = True
    await use(600)
    await sender.round()
    (hook,) = (await admin.call("GET", "webhooks", 200))["data"]
    assert (hook["pending"], hook["last_error"], hook["delivered_at"]) == (1, "connection_failed", None)
    receiver.away, receiver.status = False, "302 Found"
    await sender.round()
    receiver.status = "500 Oops"
    await sender.round()
    (hook,) = (await admin.call("GET", "webhooks", 200))["data"]
    assert (hook["pending"], hook["last_error"]) == (1, "status_500")
    receiver.status = "200 OK"
    await drain(sender)
    (hook,) = (await admin.call("GET", "webhooks", 200))["data"]
    assert (hook["pending"], hook["dead"]) == (0, 0)
    assert hook["delivered_at"] is not None
    events = receiver.events(secret)
    assert len(events) == 3, "a redirect was not followed"
    assert len({event["id"] for event in events}) == 1


async def test_undeliverable_alerts_are_given_up_and_the_queue_is_bounded(
    admin: Admin, demo: Demo, receiver: Receiver, new_sender: Any, use: Any, database: Database
) -> None:
    await add_webhook(admin, receiver.url)
    await set_limit(admin, demo, alert_at=[50])
    receiver.away = True
    await use(600)
    await drain(new_sender())
    assert receiver.num_asked == MAX_TRIES
    (hook,) = (await admin.call("GET", "webhooks", 200))["data"]
    assert (hook["pending"], hook["dead"]) == (0, 1)
    alerts = [QuotaAlert(id=f"evt_{number}") for number in range(MAX_PENDING + 2)]
    async with database.write() as session:
        await enqueue(session, alerts, now_ms, EventGroup.QUOTA)
    (hook,) = (await admin.call("GET", "webhooks", 200))["data"]
    assert (hook["pending"], hook["dead"], hook["last_error"]) == (MAX_PENDING, 3, "queue_full")
    await admin.call("DELETE", f"webhooks/{hook['id']}", 200)
    assert (await admin.call("GET", "webhooks", 200))["data"] == []
    async with database.read() as session:
        assert (await session.scalars(select(WebhookDelivery))).all() == []


async def test_alerts_of_a_killed_gateway_are_sent_by_another_after_its_lease(
    admin: Admin, demo: Demo, receiver: Receiver, new_sender: Any, use: Any, database: Database
) -> None:
    await add_webhook(admin, receiver.url)
    await set_limit(admin, demo, alert_at=[50])
    await use(600)
    stuck = new_sender()
    receiver.away = True
    await stuck.round()
    later = {"available_ms": now_ms() + 60_000, "num_tries": 1}  # as the killed one has left it
    async with database.write() as session:
        await session.execute(update(WebhookDelivery).values(later))
    receiver.away, other = False, new_sender()
    await drain(other)
    assert receiver.got == []
    async with database.write() as session:
        await session.execute(update(WebhookDelivery).values(available_ms=0))
        assert (await session.scalars(select(WebhookDelivery.state))).all() == [DeliveryState.PENDING]
    await drain(other)
    assert len(receiver.got) == 1


async def test_thresholds_are_kept_changed_and_taken_away_with_their_limit(admin: Admin, demo: Demo) -> None:
    await set_limit(admin, demo, alert_at=[50, 50, 90])
    assert (await set_limit(admin, demo, cap=2000))["alert_at"] == [50, 90]
    assert (await set_limit(admin, demo, alert_at=[80]))["alert_at"] == [80]
    entry = (await admin.call("GET", "audit", 200, params={"limit": 500}))["data"][-1]
    assert (entry["before"]["alert_at"], entry["after"]["alert_at"]) == ([50, 90], [80])
    assert (await set_limit(admin, demo, alert_at=[]))["alert_at"] == []
    limit = await set_limit(admin, demo, alert_at=[80])
    await admin.call("DELETE", f"quotas/{limit['id']}", 200)
    assert (await set_limit(admin, demo))["alert_at"] == []


async def test_thresholds_that_make_no_sense_are_refused(admin: Admin, demo: Demo) -> None:
    limit = {"level": "tenant", "scope_id": demo.tenant_id, "kind": "tokens_per_day", "cap": 1000}
    for wrong in ([0], [101], [1, 2, 3, 4, 5, 6], ["half"], [0.5], 50):
        error = (await admin.call("PUT", "quotas", 400, json={**limit, "alert_at": wrong}))["error"]
        assert (error["code"], "alert_at" in error["message"]) == ("invalid_request", True)
    for kind in ("tokens_per_minute", "requests_per_minute", "concurrent_requests"):
        error = (await admin.call("PUT", "quotas", 400, json={**limit, "kind": kind, "alert_at": [50]}))["error"]
        assert (error["code"], error["param"]) == ("no_alerts_on_this_kind", "alert_at")


ELSEWHERE = (
    "https://10.0.0.1/", "https://169.254.169.254/latest", "https://[::1]/", "https://[fe80::1]/", "https://100.64.0.1",
    "https://[::ffff:10.0.0.1]/", "https://[64:ff9b::a00:1]/", "https://[2002:a00:1::]/", "https://0.0.0.0/",
    "https://224.0.0.1/", "https://[fd00::1]/", "http://93.184.216.34/", "https://10.1/",
    "https://0x0a000001/", "https://167772161/",
)  # fmt: skip
NO_ADDRESS = (
    "ftp://example.com", "example.com", "https://", "https://u:p@example.com", "https://e.com/#x", "https://e e",
    "http://[", "https://" + "x" * 1000, "file:///etc/passwd", "https://exämple.com", "https://a\nb", "https://e.com:0x",
    "https://e.com:0", "https://e.com:65536", "https://e.com:99999/x", "https://e.com:-1", "https://@e.com", "https://:@e.com",
)  # fmt: skip


@pytest.mark.parametrize("url", ELSEWHERE)
async def test_webhooks_go_to_no_address_that_is_not_the_publics(url: str) -> None:
    with pytest.raises(BadRequest) as refused:
        LOOPBACK.check(url)
    assert refused.value.code == "address_not_allowed"
    async with WebhookClient(LOOPBACK) as poster:
        with pytest.raises(CannotReach, match="address_not_allowed"):
            await poster.post(url, b"{}", {})


@pytest.mark.parametrize("url", NO_ADDRESS)
def test_invalid_webhook_addresses_are_refused(url: str) -> None:
    with pytest.raises(BadRequest) as refused:
        LOOPBACK.check(url)
    assert (refused.value.code, refused.value.param) == ("invalid_request", "url")


async def test_an_address_that_is_refused_makes_no_webhook(admin: Admin) -> None:
    error = (await admin.call("POST", "webhooks", 400, json={"url": "https://192.168.0.1/"}))["error"]
    assert error["code"] == "address_not_allowed"
    assert (await admin.call("GET", "webhooks", 200))["data"] == []


async def test_a_name_is_judged_by_what_it_resolves_to_when_it_is_used(receiver: Receiver) -> None:
    port = httpx.URL(receiver.url).port
    async with WebhookClient(AddressPolicy()) as poster:
        for host in ("localhost", "127.1", "0x7f000001", "2130706433"):
            with pytest.raises(CannotReach, match="address_not_allowed"):
                await poster.post(f"https://{host}:{port}/", b"{}", {})
        with pytest.raises(CannotReach, match="name_not_resolved"):
            await poster.post("https://nowhere.invalid/", b"{}", {})
    assert receiver.num_asked == 0
    async with WebhookClient(AddressPolicy((ip_network("127.0.0.0/8"), ip_network("::1/128")))) as poster:
        await poster.post(f"http://localhost:{port}/hook?a=b", b"{}", {})
    ((headers, _),) = receiver.got
    assert headers["host"] == f"localhost:{port}"
    assert AddressPolicy().check("https://example.com:8443/x?y=z") == "https://example.com:8443/x?y=z"
    assert not is_special(ip_address("93.184.216.34"))
    assert not is_special(ip_address("2606:2800:220:1::1"))

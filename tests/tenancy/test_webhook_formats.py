"""Formats of webhooks: JSON, Slack and PagerDuty, their checks, test deliveries, and limits to groups of events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from ipaddress import ip_network
from typing import Any

import pytest
from tests.webhook_receivers import Receiver

from moiety_platform.alerts.models import OperationalAlert
from moiety_platform.alerts.schemas import AlertView
from moiety_platform.backoff import Backoff
from moiety_platform.clock import ManualClock
from moiety_platform.controllers import with_services
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.quota.models import QuotaAlert
from moiety_platform.webhooks.addresses import AddressPolicy
from moiety_platform.webhooks.controller import WebhookController
from moiety_platform.webhooks.deliveries import enqueue
from moiety_platform.webhooks.events import event_of_condition, event_of_quota
from moiety_platform.webhooks.formats import MAX_HEADER, body_of
from moiety_platform.webhooks.sender import AlertSender
from moiety_platform.webhooks.terms import EventGroup, WebhookFormat, hash_routing_key
from moiety_platform.webhooks.tester import MAX_EXCERPT_BYTES, WebhookTester
from moiety_platform.webhooks.webhook_client import WebhookClient

from .conftest import PEPPER, Admin, Demo, admin_app

LOOPBACK = AddressPolicy((ip_network("127.0.0.0/8"),))
ROUTING_KEY = "0123456789abcdef0123456789abcdef"
NOON = datetime(2026, 3, 9, 12, tzinfo=UTC)
BAD_NAME = "<!channel> *<http://evil.example|acme>* & co"


def make_alert(**fields: Any) -> OperationalAlert:
    given: dict[str, Any] = {
        "id": "evt_1", "condition_id": "cnd_1", "type": "engine.down", "status": "firing", "severity": "critical",
        "subject": "tcp://e:1", "summary": "Engine tcp://e:1 is down: lost", "details": {"model": "m"}, "at": NOON,
    }  # fmt: skip
    return OperationalAlert(**given | fields)


def make_quota_alert() -> QuotaAlert:
    return QuotaAlert(
        id="evt_2", quota_id="quo_1", start=datetime(2026, 3, 1, tzinfo=UTC), percent=80, tenant_id="ten_1",
        level="tenant", scope_id="ten_1", kind="money_per_month", cap=500 * 10**9, used=400_012 * 10**6, at=NOON,
    )  # fmt: skip


@pytest.fixture
async def poster() -> AsyncIterator[WebhookClient]:
    async with WebhookClient(LOOPBACK, timeout_s=5.0) as made:
        yield made


@pytest.fixture
async def admin(database: Database, clock: ManualClock, demo: Demo, poster: WebhookClient) -> AsyncIterator[Admin]:
    tester = WebhookTester(poster, [PEPPER], clock)
    routes = with_services(WebhookController, reach=LOOPBACK, tester=tester)
    client = Admin(admin_app(database, clock, more=[routes]), demo.admin_key)
    async with client.http:
        yield client


async def create(admin: Admin, receiver: Receiver, **fields: Any) -> Any:
    return await admin.call("POST", "webhooks", 201, json={"url": f"{receiver.url}/hook", **fields})


def test_a_slack_message_shows_names_as_plain_text() -> None:
    message = json.loads(body_of(event_of_quota(make_quota_alert(), BAD_NAME), WebhookFormat.SLACK))
    header, section, context = message["blocks"]
    texts = [header["text"], *section["fields"], *context["elements"]]
    assert {one["type"] for one in texts} == {"plain_text"}, "Slack parses no mention and no link in plain text"
    assert header["text"]["text"].endswith(f"80 % of money_per_month of {BAD_NAME} is used")
    assert f"Tenant: {BAD_NAME}" in [one["text"] for one in section["fields"]]
    assert "Used: $400.012 of $500" in [one["text"] for one in section["fields"]]
    assert "<" not in message["text"]
    assert "&lt;!channel&gt;" in message["text"]
    assert context["elements"][0]["text"] == "quota.threshold evt_2"


def test_the_list_of_alerts_has_amounts_in_the_units_of_people() -> None:
    alert = make_quota_alert()
    assert AlertView.of_quota(alert).summary == "80 % of money_per_month is used: $400.012 of $500"
    alert.kind, alert.used, alert.cap = "tokens_per_day", 5_141_234, 8_000_000
    assert AlertView.of_quota(alert).summary == "80 % of tokens_per_day is used: 5,141,234 of 8,000,000"


def test_a_slack_message_keeps_to_slacks_limits() -> None:
    alert = make_alert(summary="x" * 900, details={f"n{number}": "y" * 3000 for number in range(20)})
    header, section, _ = json.loads(body_of(event_of_condition(alert), WebhookFormat.SLACK))["blocks"]
    assert len(header["text"]["text"]) == MAX_HEADER
    assert len(section["fields"]) == 10
    assert max(len(one["text"]) for one in section["fields"]) == 2000


def test_pagerduty_gets_one_incident_for_a_condition_and_its_end() -> None:
    down = json.loads(body_of(event_of_condition(make_alert()), WebhookFormat.PAGERDUTY, ROUTING_KEY))
    assert (down["routing_key"], down["event_action"]) == (ROUTING_KEY, "trigger")
    payload = down["payload"]
    assert (payload["severity"], payload["source"], payload["class"]) == ("critical", "tcp://e:1", "engine.down")
    assert payload["summary"] == "Engine tcp://e:1 is down: lost"
    assert payload["custom_details"]["event"]["id"] == "evt_1"
    up = make_alert(id="evt_9", type="engine.up", status="resolved", severity="info")
    ended = json.loads(body_of(event_of_condition(up), WebhookFormat.PAGERDUTY, ROUTING_KEY))
    assert ended == {"routing_key": ROUTING_KEY, "event_action": "resolve", "dedup_key": down["dedup_key"]}


def test_json_is_the_event_itself() -> None:
    event = json.loads(body_of(event_of_condition(make_alert()), WebhookFormat.JSON))
    assert event == {
        "id": "evt_1", "type": "engine.down", "at": "2026-03-09T12:00:00Z", "condition_id": "cnd_1",
        "status": "firing", "severity": "critical", "subject": "tcp://e:1",
        "summary": "Engine tcp://e:1 is down: lost", "details": {"model": "m"},
    }  # fmt: skip


async def test_a_routing_key_is_kept_and_never_shown(admin: Admin, receiver: Receiver) -> None:
    made = await create(admin, receiver, format="pagerduty", routing_key=ROUTING_KEY, events=["slo", "engine"])
    assert (made["webhook"]["format"], made["webhook"]["events"]) == ("pagerduty", ["engine", "slo"])
    assert made["webhook"]["routing_key_hint"] == ROUTING_KEY[-4:]
    assert made["webhook"]["routing_key_hash"] == hash_routing_key(made["webhook"]["url"], ROUTING_KEY)
    listed = await admin.http.get("webhooks")
    audit = await admin.http.get("audit")
    assert ROUTING_KEY not in made["secret"] + listed.text + audit.text
    (plain,) = [one for one in (await create(admin, receiver)).items() if one[0] == "webhook"]
    assert (plain[1]["format"], plain[1]["routing_key_hint"]) == ("json", None)
    assert plain[1]["events"] == [group.value for group in EventGroup]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"format": "teams"}, "format"),
        ({"format": "pagerduty"}, "routing_key"),
        ({"format": "pagerduty", "routing_key": "short"}, "routing_key"),
        ({"format": "pagerduty", "routing_key": f"{ROUTING_KEY[:-1]}\n"}, "routing_key"),
        ({"format": "slack", "routing_key": ROUTING_KEY}, "routing_key"),
        ({"routing_key": ROUTING_KEY}, "routing_key"),
        ({"events": []}, "events"),
        ({"events": ["engine", "engine"]}, "events"),
        ({"events": ["engines"]}, "events"),
    ],
)
async def test_fields_that_do_not_fit_are_refused(
    admin: Admin, receiver: Receiver, fields: dict[str, Any], param: str
) -> None:
    body = {"url": receiver.url, **fields}
    error = (await admin.call("POST", "webhooks", 400, json=body))["error"]
    assert error["param"] == param
    assert (await admin.call("GET", "webhooks", 200))["data"] == []


async def test_a_test_delivery_reports_the_status_and_the_beginning_of_the_response(
    admin: Admin, receiver: Receiver
) -> None:
    made = await create(admin, receiver, format="slack")
    path = f"webhooks/{made['webhook']['id']}/test"
    receiver.status, receiver.text = "200 OK", "ok"
    report = await admin.call("POST", path, 200)
    assert (report["delivered"], report["status"], report["error"], report["excerpt"]) == (True, 200, None, "ok")
    (message,) = receiver.events(made["secret"])
    assert message["blocks"][0]["text"]["text"].endswith("Test delivery of a webhook of Moiety")
    receiver.status, receiver.text = "404 Not Found", "no_service " + "é" * 1000
    report = await admin.call("POST", path, 200)
    assert (report["delivered"], report["status"], report["error"]) == (False, 404, "status_404")
    assert report["excerpt"].startswith("no_service éé")
    assert len(report["excerpt"].encode()) <= MAX_EXCERPT_BYTES + 2
    receiver.away = True
    report = await admin.call("POST", path, 200)
    assert (report["delivered"], report["status"], report["error"]) == (False, None, "connection_failed")
    (shown,) = (await admin.call("GET", "webhooks", 200))["data"]
    assert (shown["pending"], shown["delivered_at"], shown["last_error"]) == (0, None, None)
    await admin.call("POST", "webhooks/whk_none/test", 404)


async def test_a_test_delivery_at_pagerduty_resolves_its_incident(admin: Admin, receiver: Receiver) -> None:
    made = await create(admin, receiver, format="pagerduty", routing_key=ROUTING_KEY)
    receiver.status, receiver.text = "202 Accepted", '{"status":"success"}'
    report = await admin.call("POST", f"webhooks/{made['webhook']['id']}/test", 200)
    assert (report["delivered"], report["status"]) == (True, 202)
    opened, ended = receiver.events(made["secret"])
    assert (opened["event_action"], ended["event_action"]) == ("trigger", "resolve")
    assert opened["dedup_key"] == ended["dedup_key"]
    receiver.got.clear()
    receiver.status = "400 Bad Request"
    report = await admin.call("POST", f"webhooks/{made['webhook']['id']}/test", 200)
    assert (report["error"], len(receiver.got)) == ("status_400", 1)


async def test_each_webhook_gets_its_groups_of_events_in_its_format(
    admin: Admin, receiver: Receiver, database: Database, clock: ManualClock, poster: WebhookClient
) -> None:
    slack = await create(admin, receiver, format="slack", events=["engine"])
    pager = await create(admin, receiver, format="pagerduty", routing_key=ROUTING_KEY, events=["quota", "engine"])
    await create(admin, receiver, events=["disk"])
    async with database.write() as session:
        alerts = [make_alert(), make_quota_alert()]
        session.add_all(alerts)
        await session.flush()
        await enqueue(session, alerts[:1], now_ms, EventGroup.ENGINE)
        await enqueue(session, alerts[1:], now_ms, EventGroup.QUOTA)
    sender = AlertSender(database, poster, PEPPER, clock, backoff=Backoff(0.0, 0.0))
    receiver.status = "429 Too Many Requests"
    await sender.round()
    assert len(receiver.got) == 3
    receiver.got.clear()
    receiver.status = "202 Accepted"
    while await sender.round():
        pass
    bodies = [json.loads(body) for _, body in receiver.got]
    assert sum("blocks" in body for body in bodies) == 1
    assert sorted(body["payload"]["class"] for body in bodies if "payload" in body) == [
        "engine.down", "quota.threshold",
    ]  # fmt: skip
    assert len(bodies) == 3
    assert slack["secret"] != pager["secret"]

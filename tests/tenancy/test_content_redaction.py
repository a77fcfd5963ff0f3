"""Redaction of contents by an endpoint of the operator: nothing is stored that it has not seen and answered."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from ipaddress import ip_network
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs
from tests.webhook_receivers import Receiver

from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.reloading.shown import shown
from moiety_platform.request_contents.redaction import MAX_ANSWER_BYTES, ContentRedactor, RedactionFailed
from moiety_platform.request_contents.service import read_content
from moiety_platform.request_contents.terms import MAX_CHARS, Content
from moiety_platform.request_contents.writer import MAX_QUEUED_CHARS, ContentWriter
from moiety_platform.settings import GatewaySettings
from moiety_platform.webhooks.addresses import AddressPolicy
from moiety_platform.webhooks.json_endpoint import JsonEndpoint

from .conftest import Demo, listening
from .test_request_contents import CARD, CIPHER, captured, num_stored, opt_in

LOOPBACK = AddressPolicy((ip_network("127.0.0.0/8"),))
GIVEN = Content(f"Ada pays with {CARD}", ["Hello Ada", "2nd"], is_cut=True)


@pytest.fixture
async def endpoint() -> AsyncIterator[Receiver]:
    started = Receiver()
    started.status = "200 OK"
    async with listening(started.serve) as started.url:
        yield started


@pytest.fixture
async def redactor(endpoint: Receiver) -> AsyncIterator[ContentRedactor]:
    opened = ContentRedactor(JsonEndpoint(LOOPBACK, MAX_ANSWER_BYTES), endpoint.url, timeout_s=60.0)
    yield opened
    await opened.endpoint.close()


def answer(*texts: str) -> str:
    return json.dumps({"texts": texts})


async def test_the_endpoint_gets_what_the_detectors_leave_and_its_texts_are_stored(
    endpoint: Receiver, redactor: ContentRedactor
) -> None:
    endpoint.text = answer("[name] pays", "Hello [name]", "2nd")
    found = await redactor.redact("ten_a", "r1", GIVEN)
    assert found == Content("[name] pays", ["Hello [name]", "2nd"], is_cut=True)
    ((headers, body),) = endpoint.got
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {
        "request_id": "r1",
        "tenant_id": "ten_a",
        "texts": ["Ada pays with [redacted: card numbers]", "Hello Ada", "2nd"],
    }


async def test_a_password_in_the_url_authenticates_and_is_shown_nowhere(
    endpoint: Receiver, redactor: ContentRedactor
) -> None:
    endpoint.text = answer("a", "b", "c")
    redactor.url = endpoint.url.replace("http://", "http://moiety:p4ss@")
    await redactor.redact("ten_a", "r1", GIVEN)
    ((headers, _),) = endpoint.got
    assert headers["authorization"] == "Basic " + b64encode(b"moiety:p4ss").decode()
    assert "p4ss" not in shown(redactor.url)
    with pytest.raises(ValidationError, match="must be a URL") as refusal:
        GatewaySettings(content_redaction_url="ftp://moiety:p4ss@redaction.example.com")
    assert "p4ss" not in str(refusal.value)


async def test_without_an_endpoint_the_detectors_redact() -> None:
    found = await ContentRedactor(JsonEndpoint(AddressPolicy(), MAX_ANSWER_BYTES)).redact("ten_a", "r1", GIVEN)
    assert found.input == "Ada pays with [redacted: card numbers]"


@pytest.mark.parametrize(
    ("status", "text", "reason"),
    [
        ("500 No", answer("a", "b", "c"), "status_500"),
        ("302 Found", answer("a", "b", "c"), "status_302"),
        ("200 OK", answer("a", "b"), "another_number_of_texts"),
        ("200 OK", '{"texts": "abc"}', "invalid_answer"),
        ("200 OK", "<html>", "invalid_answer"),
        ("200 OK", "x" * (MAX_ANSWER_BYTES + 1), "answer_too_long"),
    ],
)
async def test_any_other_answer_is_a_failure(
    endpoint: Receiver, redactor: ContentRedactor, status: str, text: str, reason: str
) -> None:
    endpoint.status, endpoint.text = status, text
    with pytest.raises(RedactionFailed, match=reason):
        await redactor.redact("ten_a", "r1", GIVEN)


async def test_an_endpoint_that_is_away_silent_or_not_permitted_is_a_failure(
    endpoint: Receiver, redactor: ContentRedactor
) -> None:
    endpoint.away = True
    with pytest.raises(RedactionFailed, match="connection_failed"):
        await redactor.redact("ten_a", "r1", GIVEN)
    redactor.endpoint.reach = AddressPolicy()
    with pytest.raises(RedactionFailed, match="address_not_allowed"):
        await redactor.redact("ten_a", "r1", GIVEN)

    async def never(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _reader.read()
        writer.close()

    async with listening(never) as url:
        silent = ContentRedactor(JsonEndpoint(LOOPBACK, MAX_ANSWER_BYTES), url, timeout_s=0.05)
        with pytest.raises(RedactionFailed, match="timeout"):
            await silent.redact("ten_a", "r1", GIVEN)
        await silent.endpoint.close()


async def test_a_content_of_a_tenant_that_opted_out_meanwhile_does_not_leave_the_gateway(
    database: Database, demo: Demo, clock: ManualClock, endpoint: Receiver, redactor: ContentRedactor
) -> None:
    writer = ContentWriter(database, CIPHER, redactor)
    writer.put("r1", captured(demo.tenant_id, "Ada", opt_in_id=await opt_in(database, demo, clock) + "x"))
    await writer.write_queued()
    assert (endpoint.got, await num_stored(database)) == ([], 0)


async def test_a_content_that_cannot_be_sealed_holds_up_no_other(
    database: Database, demo: Demo, clock: ManualClock, endpoint: Receiver, redactor: ContentRedactor
) -> None:
    endpoint.text = answer("[name]")
    terms: dict[str, Any] = {"opt_in_id": await opt_in(database, demo, clock)}
    writer = ContentWriter(database, CIPHER, redactor)
    writer.put("r1", captured(demo.tenant_id, "\ud800", **terms))  # a surrogate, which UTF-8 has no bytes for
    writer.put("r2", captured(demo.tenant_id, "Ada", **terms))
    await writer.write_queued()
    assert (await num_stored(database), writer.num_dropped) == (1, 1)


async def test_a_content_that_is_not_redacted_is_not_stored_and_delays_no_other_round(
    database: Database, demo: Demo, clock: ManualClock, endpoint: Receiver, redactor: ContentRedactor
) -> None:
    terms: dict[str, Any] = {"opt_in_id": await opt_in(database, demo, clock)}
    writer = ContentWriter(database, CIPHER, redactor)
    endpoint.status = "503 Busy"
    for number in range(3):
        writer.put(f"r{number}", captured(demo.tenant_id, "Ada", **terms))
    await writer.write_queued()
    assert (await num_stored(database), writer.num_dropped) == (0, 3)
    endpoint.status, endpoint.text = "200 OK", answer("[name]")
    writer.put("r3", captured(demo.tenant_id, "Ada", **terms))
    await writer.write_queued()
    async with database.read() as session:
        assert (await read_content(session, CIPHER, "r3")).input == "[name]"
    assert await num_stored(database) == 1


async def test_the_log_says_what_to_do(
    database: Database, demo: Demo, clock: ManualClock, endpoint: Receiver, redactor: ContentRedactor
) -> None:
    terms: dict[str, Any] = {"opt_in_id": await opt_in(database, demo, clock)}
    writer = ContentWriter(database, CIPHER, redactor)
    endpoint.status = "503 Busy"
    with capture_logs() as said:
        for reach in (LOOPBACK, AddressPolicy()):
            redactor.endpoint.reach = reach
            writer.put("r1", captured(demo.tenant_id, "Ada", **terms))
            await writer.write_queued()
        for number in range(1 + MAX_QUEUED_CHARS // MAX_CHARS):
            writer.put(f"r{number}", captured(demo.tenant_id, "x" * MAX_CHARS, **terms))
    told = [(one["event"], one.get("reason", ""), one["advice"]) for one in said]
    assert [one[:2] for one in told] == [
        ("request_content_not_redacted", "status_503"),
        ("request_content_not_redacted", "address_not_allowed"),
        ("request_contents_dropped", ""),
    ]
    assert "webhook_networks" not in told[0][2] and "webhook_networks" in told[1][2]
    assert "content_redaction_url" in told[2][2]


@pytest.mark.parametrize("url", ["redact.example.com", "ftp://example.com/x", "https://"])
def test_the_url_must_be_one(url: str) -> None:
    with pytest.raises(ValueError, match="must be a URL"):
        GatewaySettings(content_redaction_url=url)

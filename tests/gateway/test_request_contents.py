"""Contents of requests through a running gateway: for tenants that opted in, and for their own administrators only."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import ModelCard

from .conftest import DEADLINE_S, RunningGateway, StartGateway
from .test_guardrails import CARD, CHAT, KEY, asked, saying, set_guardrail

Opted = tuple[str, str]
"""Id of the tenant, and the key of its administrator."""


async def opt_in(gateway: RunningGateway) -> Opted:
    (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
    made = await gateway.admin(
        "POST", "/keys", {"name": "boss", "role": "tenant-admin", "tenant_id": tenant["id"]}, expect=201
    )
    status, _, answer = await gateway.request(
        "PUT", f"/admin/v1/request-contents/logging/{tenant['id']}", b'{"keep_days": 2}', made["secret"]
    )
    assert status == 200 and json.loads(answer)["is_on"], answer
    return tenant["id"], made["secret"]


async def content_of(gateway: RunningGateway, opted: Opted, request_id: str) -> dict[str, Any]:
    """The content of a request, once it is stored."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            path = f"/admin/v1/request-contents/{request_id}"
            status, _, answer = await gateway.request("GET", path, b"", opted[1])
            if status == 200:
                return json.loads(answer)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_content_of_a_request_is_logged_from_the_opt_in_to_the_opt_out(
    start_gateway: StartGateway, card: ModelCard, stream: bool
) -> None:
    engine = FakeEngineClient(card, saying("it is ", KEY, " indeed"))
    async with start_gateway([engine]) as gateway:
        assert (await gateway.post(CHAT, asked("before", stream=stream)))[0] == 200
        opted = await opt_in(gateway)
        assert (await gateway.post(CHAT, asked(f"pay with {CARD}", stream=stream, n=2)))[0] == 200
        rows = await gateway.rows.wait_for(2)
        found = await content_of(gateway, opted, rows[1].request_id)
        assert "pay with [redacted: card numbers]" in found["input"]
        assert found["outputs"] == ["it is [redacted: secrets] indeed"] * 2
        status, _, answer = await gateway.request(
            "GET", f"/admin/v1/request-contents/{rows[0].request_id}", b"", opted[1]
        )
        assert status == 404 and json.loads(answer)["error"]["code"] == "request_content_not_found"
        refused = await gateway.admin("GET", f"/request-contents/{rows[1].request_id}", expect=403)
        assert refused["error"]["code"] == "missing_role", "not even an owner of the deployment reads it"
        await gateway.admin("PUT", f"/request-contents/logging/{opted[0]}", {}, expect=403)
        log = (await gateway.admin("GET", "/audit"))["data"]
        read = [one["object_id"] for one in log if one["action"] == "read"]
        assert set(read) == {rows[1].request_id}, "who read it is in the audit log"
        off = await gateway.request("DELETE", f"/admin/v1/request-contents/logging/{opted[0]}", b"", opted[1])
        assert json.loads(off[2]) == {"tenant_id": opted[0], "is_on": False, "keep_days": None, "set_at": None}
        assert (await gateway.post(CHAT, asked("after", stream=stream)))[0] == 200
        assert not (await gateway.admin("GET", f"/request-contents/logging/{opted[0]}"))["is_on"]


async def test_guardrails_still_check_the_texts_of_a_tenant_that_opted_in(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card, saying("it is ", KEY))
    async with start_gateway([engine]) as gateway:
        opted = await opt_in(gateway)
        await set_guardrail(gateway, "output")
        status, _, answer = await gateway.post(CHAT, asked("hello"))
        assert status == 400 and KEY.encode() not in answer
        (row,) = await gateway.rows.wait_for(1)
        found = await content_of(gateway, opted, row.request_id)
        assert "hello" in found["input"] and KEY not in str(found)
        await set_guardrail(gateway, "input")
        assert (await gateway.post(CHAT, asked(f"pay with {CARD}")))[0] == 400
        _, blocked = await gateway.rows.wait_for(2)
        found = await content_of(gateway, opted, blocked.request_id)
        assert "pay with [redacted: card numbers]" in found["input"] and found["outputs"] == []

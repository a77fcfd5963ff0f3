"""Requests with JWTs of a trusted issuer in the place of an API key, through a whole gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.token_issuer import AUDIENCE, TokenIssuer, started_issuer

from moiety_platform.engine_client.fake import FakeEngineClient

from .conftest import DEADLINE_S, NewCard, RunningGateway, StartGateway

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 2,
    "user": "whoever",
}


@pytest.fixture
async def issuer() -> AsyncIterator[TokenIssuer]:
    async with started_issuer() as started:
        yield started


@pytest.fixture
async def trusting(
    start_gateway: StartGateway, new_card: NewCard, issuer: TokenIssuer
) -> AsyncIterator[RunningGateway]:
    """A gateway that trusts the issuer for the project of its first key."""
    async with start_gateway([FakeEngineClient(new_card())], webhook_networks=("127.0.0.0/8",)) as gateway:
        yield gateway


async def trust(gateway: RunningGateway, issuer: TokenIssuer, **fields: Any) -> Any:
    (project,) = (await gateway.admin("GET", "/projects"))["data"]
    grants = [{"project": project["id"]}]
    body = {"name": "ci", "url": issuer.url, "audience": AUDIENCE, "grants": grants, **fields}
    return await gateway.admin("PUT", "/issuers", body)


def code_of(answer: bytes) -> str:
    return str(json.loads(answer)["error"]["code"])


async def test_every_api_takes_a_token_and_usage_names_its_key_and_subject(
    trusting: RunningGateway, issuer: TokenIssuer
) -> None:
    issued = await trust(trusting, issuer)
    token = issuer.token(sub="repo:acme/web")
    assert (await trusting.post(CHAT, HELLO, key=token))[0] == 200
    assert (await trusting.post(CHAT, HELLO | {"stream": True}, key=token))[0] == 200
    message = {name: value for name, value in HELLO.items() if name != "user"}
    headers = {"x-api-key": token, "Authorization": None}
    assert (await trusting.post("/v1/messages", message, headers=headers))[0] == 200
    assert (await trusting.post("/v1/responses", {"model": "tiny", "input": "a", "max_output_tokens": 16}, key=token))[
        0
    ] == 200
    rows = await trusting.rows.wait_for(4)
    assert {(row.key_id, row.end_user) for row in rows} == {(issued["key_ids"][0], "repo:acme/web")}
    assert {row.outcome for row in rows} <= {"stop", "length"}
    assert (await trusting.request("GET", "/v1/models", key=token))[0] == 200
    assert (await trusting.post(CHAT, HELLO))[0] == 200
    assert (await trusting.rows.wait_for(5))[-1].end_user == "whoever", "a key leaves the end user to the request"
    status, _, answer = await trusting.request("GET", "/admin/v1/tenants", key=token)
    assert (status, code_of(answer)) == (403, "missing_scope"), "no token of an issuer for inference administers"


async def test_the_request_may_name_the_end_user_where_the_issuer_names_none(
    trusting: RunningGateway, issuer: TokenIssuer
) -> None:
    await trust(trusting, issuer, end_user_claim=None)
    assert (await trusting.post(CHAT, HELLO, key=issuer.token()))[0] == 200
    assert (await trusting.rows.wait_for(1))[0].end_user == "whoever"


async def test_models_and_quotas_of_the_issuers_key_apply_to_its_tokens(
    trusting: RunningGateway, issuer: TokenIssuer
) -> None:
    issued = await trust(trusting, issuer, models=["other"])
    status, _, answer = await trusting.post(CHAT, HELLO, key=issuer.token())
    assert (status, code_of(answer)) == (404, "model_not_found")
    again = await trust(trusting, issuer)
    assert again["key_ids"] == issued["key_ids"]
    limit = {"level": "key", "scope_id": again["key_ids"][0], "kind": "requests_per_minute", "cap": 1}
    await trusting.admin("PUT", "/quotas", limit)
    async with asyncio.timeout(DEADLINE_S):
        statuses = [(await trusting.post(CHAT, HELLO, key=issuer.token(sub=f"s{number}")))[0] for number in range(3)]
    assert statuses == [200, 429, 429]
    assert (await trusting.post(CHAT, HELLO))[0] == 200, "other keys of the project have their own"


async def run_batch(trusting: RunningGateway, issuer: TokenIssuer, key_id: str) -> Any:
    """Run a batch of one line with a token; return its usage row."""
    client = trusting.client.with_options(api_key=issuer.token())
    body = {"model": "tiny", "messages": HELLO["messages"], "max_tokens": 2}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}).encode()
    file = await client.files.create(file=("lines.jsonl", line), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    async with asyncio.timeout(DEADLINE_S):
        while batch.status != "completed":
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    assert batch.request_counts is not None and batch.request_counts.completed == 1
    (row,) = (await trusting.admin("GET", f"/usage/requests?key_id={key_id}"))["data"]
    return row


async def test_batches_of_a_token_run_after_it_has_ended(trusting: RunningGateway, issuer: TokenIssuer) -> None:
    issued = await trust(trusting, issuer)
    row = await run_batch(trusting, issuer, issued["key_ids"][0])
    assert row["outcome"] in ("stop", "length") and row["end_user"] == "ada"
    assert row["service_class"] == "batch"


async def test_batches_of_a_token_keep_to_the_class_of_its_issuer(
    trusting: RunningGateway, issuer: TokenIssuer
) -> None:
    overnight = {"name": "overnight", "rank": 9, "completion_s": 86_400, "on_overload": "queue"}
    await trusting.admin("POST", "/classes", overnight, 201)
    issued = await trust(trusting, issuer, service_class="overnight", end_user_claim=None)
    assert (await run_batch(trusting, issuer, issued["key_ids"][0]))["service_class"] == "overnight"


async def test_tokens_that_no_issuer_vouches_for_get_401_in_each_apis_form(
    trusting: RunningGateway, issuer: TokenIssuer
) -> None:
    token = issuer.token()
    for path in (CHAT, "/v1/files", "/v1/models"):
        method = "POST" if path == CHAT else "GET"
        status, _, answer = await trusting.request(method, path, b"{}" if path == CHAT else b"", token)
        assert (status, code_of(answer)) == (401, "unknown_issuer")
    status, _, answer = await trusting.post("/v1/messages", HELLO, headers={"x-api-key": token})
    assert status == 401 and json.loads(answer)["error"]["type"] == "authentication_error"
    assert issuer.paths == []
    await trust(trusting, issuer)
    issuer.away = True
    status, head, answer = await trusting.post(CHAT, HELLO, key=token)
    assert (status, code_of(answer)) == (503, "issuer_unavailable") and int(head["retry-after"]) > 0

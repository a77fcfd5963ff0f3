"""One `Idempotency-Key`, one generation: repeated at any gateway, at any time, by any client of the tenant."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import generate_latest
from sqlalchemy import event, select
from tests.database_clock import DatabaseClock

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.idempotency.key_store_client import CLAIM_S, IdempotencyKeys
from moiety_platform.idempotency.keys import KeyBinding
from moiety_platform.idempotency.limits import AnswerStorageLimits
from moiety_platform.idempotency.models import IdempotentRequest
from moiety_platform.idempotency.store import KeyStore
from moiety_wire.messages import ModelCard, Submit

from .conftest import NewCard, RunningGateway, StartGateway, Until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
LIMITS = AnswerStorageLimits(ttl_s=60, max_answer_bytes=10_000, max_keys_per_tenant=100, max_bytes_per_tenant=100_000)

CONVERSATION: dict[str, Any] = {"messages": BODY["messages"], "max_tokens": 4}
EVERY_ENDPOINT = [
    (CHAT, CONVERSATION),
    (CHAT, {**CONVERSATION, "stream": True}),
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 4}),
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 4, "stream": True}),
    (MESSAGES, CONVERSATION),
    (MESSAGES, {**CONVERSATION, "stream": True}),
    (RESPONSES, {"input": "hello", "max_output_tokens": 4}),
    (RESPONSES, {"input": "hello", "max_output_tokens": 4, "stream": True}),
    (EMBEDDINGS, {"input": "hello"}),
]


def keyed(key: str = "order-1") -> dict[str, str]:
    return {"Idempotency-Key": key}


def endless(submit: Submit) -> Any:
    return ((65, "x" * 50) for _ in range(submit.stopping.max_tokens))


def code_of(answer: bytes) -> str:
    return json.loads(answer)["error"]["code"]


@pytest.fixture
async def other(
    gateway: RunningGateway, start_gateway: StartGateway, new_card: NewCard
) -> AsyncIterator[RunningGateway]:
    """A second gateway on the same database, with an engine of its own."""
    engine = FakeEngineClient(new_card("engine-2"))
    async with start_gateway([engine], beside=gateway) as running:
        yield running


def num_generations(*gateways: Any) -> int:
    return sum(len(gateway.engine.submits) for gateway in gateways)


async def test_a_repeated_request_gets_the_first_answer_at_every_gateway_and_is_charged_once(
    gateway: RunningGateway, other: RunningGateway
) -> None:
    kinds = [
        lambda client, key: client.chat.completions.with_raw_response.create(**BODY, extra_headers=keyed(key)),
        lambda client, key: client.completions.with_raw_response.create(
            model="tiny", prompt="hello", max_tokens=3, extra_headers=keyed(key)
        ),
    ]
    for number, create in enumerate(kinds, 1):
        first = await create(gateway.client, f"key-{number}")
        again = await create(gateway.client, f"key-{number}")
        elsewhere = await create(other.client, f"key-{number}")
        assert first.content == again.content == elsewhere.content
        assert "idempotent-replayed" not in first.headers
        for answer in (again, elsewhere):
            assert answer.headers["idempotent-replayed"] == "true"
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["x-moiety-class"] == "standard"
            assert "x-ratelimit-limit-tokens" not in answer.headers
        assert again.parse().id == first.parse().id
        assert len(await gateway.rows.wait_for(number)) == number
    assert other.rows.rows == []
    assert num_generations(gateway, other) == 2
    assert 'moiety_idempotency_total{outcome="replayed"} 2.0' in generate_latest(gateway.metrics.registry).decode()


@pytest.mark.parametrize(("path", "fields"), EVERY_ENDPOINT)
async def test_every_endpoint_replays_what_is_repeated_and_refuses_what_is_not(
    start_gateway: StartGateway, new_card: NewCard, path: Any, fields: Any
) -> None:
    async with start_gateway([FakeEngineClient(new_card(embedding_width=8))]) as gateway:
        body: dict[str, Any] = {"model": "tiny", **fields}
        status, first_headers, first = await gateway.post(path, body, headers=keyed())
        again = await gateway.post(path, body, headers=keyed())
        assert (status, "idempotent-replayed" in first_headers) == (200, False), first
        assert (again[0], again[1]["idempotent-replayed"], again[2]) == (200, "true", first)
        for name in ("content-type", "x-moiety-class", "x-moiety-admission"):
            assert again[1][name] == first_headers[name]
        status, _, answer = await gateway.post(path, {**body, "service_tier": "auto"}, headers=keyed())
        error = json.loads(answer)["error"]
        code = error["details"]["error_code"] if path == MESSAGES else error["code"]
        assert (status, error["type"], code) == (422, "invalid_request_error", "idempotency_key_reused")
        assert num_generations(gateway) == len(await gateway.rows.wait_for(1)) == 1


async def test_an_answer_in_pieces_is_kept_whole_or_not_at_all(start_gateway: StartGateway, new_card: NewCard) -> None:
    engine = FakeEngineClient(new_card(embedding_width=8))
    async with start_gateway([engine], idempotency_max_answer_bytes=10_000) as gateway:
        for number, (num_inputs, status) in enumerate([(40, 200), (400, 410)]):
            body: dict[str, Any] = {"model": "tiny", "input": ["hello"] * num_inputs}
            first = await gateway.post(EMBEDDINGS, body, headers=keyed(f"key-{number}"))
            again = await gateway.post(EMBEDDINGS, body, headers=keyed(f"key-{number}"))
            assert (first[0], again[0]) == (200, status)
            assert len(json.loads(first[2])["data"]) == num_inputs
            assert (again[2] == first[2]) == (status == 200)


async def test_a_stream_is_replayed_byte_for_byte(gateway: RunningGateway, other: RunningGateway) -> None:
    body: dict[str, Any] = {**BODY, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 40}
    _, first_headers, first = await gateway.post(CHAT, body, headers=keyed())
    status, headers, again = await other.post(CHAT, body, headers=keyed())
    assert (status, again) == (200, first)
    assert first.endswith(b"data: [DONE]\n\n") and first.count(b"data: ") > 40
    assert headers["idempotent-replayed"] == "true"
    assert headers["content-type"] == first_headers["content-type"] == "text/event-stream; charset=utf-8"
    stream = await other.client.chat.completions.create(**body, extra_headers=keyed("with-the-client"))
    chunks = [chunk async for chunk in stream]
    again = await gateway.client.chat.completions.create(**body, extra_headers=keyed("with-the-client"))
    assert [chunk async for chunk in again] == chunks
    assert num_generations(gateway, other) == 2


async def test_a_key_with_another_body_or_endpoint_is_refused(gateway: RunningGateway) -> None:
    await gateway.client.chat.completions.create(**BODY, extra_headers=keyed())
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await gateway.client.chat.completions.create(**BODY | {"max_tokens": 5}, extra_headers=keyed())
    assert caught.value.code == "idempotency_key_reused"
    assert "new Idempotency-Key" in caught.value.message
    status, _, answer = await gateway.post(COMPLETIONS, json.dumps(BODY).encode(), headers=keyed())
    assert (status, code_of(answer)) == (422, "idempotency_key_reused")
    assert num_generations(gateway) == 1


async def test_one_of_twenty_concurrent_requests_with_one_key_is_served_and_billed(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = [FakeEngineClient(new_card(f"engine-{number}"), token_s=0.05) for number in range(2)]
    async with (
        start_gateway(engines[:1]) as first,
        start_gateway(engines[1:], beside=first) as second,
    ):
        answers = await asyncio.gather(*(gateway.post(CHAT, BODY, headers=keyed()) for gateway in [first, second] * 10))
        served = [answer for answer in answers if answer[0] == 200]
        turned_away = [answer for answer in answers if answer[0] != 200]
        assert len({answer for _, _, answer in served}) == 1
        assert sum("idempotent-replayed" not in headers for _, headers, _ in served) == 1
        for status, headers, answer in turned_away:
            assert (status, code_of(answer)) == (409, "idempotency_key_in_use")
            assert headers["retry-after"] == "1"
        assert turned_away, "all came while the first one ran"
        assert num_generations(first, second) == 1
        assert len(first.rows.rows) + len(second.rows.rows) == 1


async def test_the_openai_client_waits_for_the_first_request_by_itself(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    async with start_gateway([FakeEngineClient(new_card(), token_s=0.05)]) as gateway:
        client = gateway.client.with_options(max_retries=3)
        answers = await asyncio.gather(
            *(client.chat.completions.create(**BODY, extra_headers=keyed()) for _ in range(3))
        )
        assert len({answer.id for answer in answers}) == 1
        assert num_generations(gateway) == 1


async def test_failed_requests_are_not_stored_under_their_key(start_gateway: StartGateway, new_card: NewCard) -> None:
    engine = FakeEngineClient(new_card(max_context_tokens=100_000))
    async with start_gateway([engine]) as gateway:
        bad: dict[str, Any] = {**BODY, "max_tokens": 1_000_000}
        assert (await gateway.post(CHAT, bad, headers=keyed()))[0] == 400
        assert (await gateway.post(CHAT, b"{", headers=keyed()))[0] == 400  # the key is free for any body again
        engine.die()
        status, _, answer = await gateway.post(CHAT, BODY, headers=keyed())
        assert status == 503, answer
        await engine.start()
        status, headers, answer = await gateway.post(CHAT, BODY, headers=keyed())
        assert (status, "idempotent-replayed" in headers) == (200, False), answer


async def post_endless(gateway: RunningGateway, until: Until, *, stream: bool) -> asyncio.Task[Any]:
    """Post a request with a key whose answer has begun and does not end by itself."""
    body: dict[str, Any] = {**BODY, "max_tokens": 1_000_000, "stream": stream}
    posting = asyncio.create_task(gateway.post(CHAT, body, headers=keyed()))
    await until(lambda: gateway.engine.state.load.output_tokens_total > 5)
    return posting


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelled_requests_are_not_stored_under_their_key(
    start_gateway: StartGateway, new_card: NewCard, until: Until, stream: bool
) -> None:
    engine = FakeEngineClient(new_card(max_context_tokens=10_000_000), endless)
    async with start_gateway([engine]) as gateway:
        posting = await post_endless(gateway, until, stream=stream)
        posting.cancel()
        await gateway.rows.wait_for(1)
        for _ in range(500):  # until the gateway has given the key back
            status, headers, answer = await gateway.post(CHAT, {**BODY, "max_tokens": 3}, headers=keyed())
            if status == 200:
                break
            assert code_of(answer) == "idempotency_key_reused"
        assert (status, "idempotent-replayed" in headers) == (200, False)


async def test_a_stream_that_breaks_off_is_not_kept(
    start_gateway: StartGateway, new_card: NewCard, until: Until
) -> None:
    engine = FakeEngineClient(new_card(max_context_tokens=10_000_000), endless)
    async with start_gateway([engine]) as gateway:
        posting = await post_endless(gateway, until, stream=True)
        engine.die()
        _, _, answer = await posting
        assert b'"code":"engine_failed"' in answer
        await engine.start()
        status, headers, _ = await gateway.post(CHAT, BODY, headers=keyed())
        assert (status, "idempotent-replayed" in headers) == (200, False)


async def test_a_key_whose_gateway_was_killed_is_free_again_when_its_claim_expires(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    clock = DatabaseClock()
    async with start_gateway([FakeEngineClient(card)], now=clock.now) as gateway:
        tenant = await _tenant_of(gateway)
        killed = IdempotencyKeys(gateway.database, KeyStore(now=clock.now), LIMITS)  # nothing renews its claims
        await killed.claim(b"order-1", KeyBinding(tenant["tenant_id"], tenant["project_id"], None, CHAT, b"any"))
        status, _, answer = await gateway.post(CHAT, b"any", headers=keyed())
        assert (status, code_of(answer)) == (409, "idempotency_key_in_use")
        clock.advance(CLAIM_S)
        first = await gateway.post(CHAT, BODY, headers=keyed())
        again = await gateway.post(CHAT, BODY, headers=keyed())
        assert (first[0], again[1]["idempotent-replayed"], again[2]) == (200, "true", first[2])
        clock.ms += 24 * 3600 * 1000
        assert "idempotent-replayed" not in (await gateway.post(CHAT, BODY, headers=keyed()))[1]


async def test_an_answer_too_large_to_store_is_marked(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], idempotency_max_answer_bytes=1000) as gateway:
        for number, stream in enumerate((False, True)):
            body: dict[str, Any] = {**BODY, "max_tokens": 400, "stream": stream}
            assert (await gateway.post(CHAT, body, headers=keyed(f"large-{number}")))[0] == 200
            status, _, answer = await gateway.post(CHAT, body, headers=keyed(f"large-{number}"))
            assert (status, code_of(answer)) == (410, "idempotency_answer_not_kept")
            assert "new Idempotency-Key" in json.loads(answer)["error"]["message"]
        assert num_generations(gateway) == 2


async def test_a_tenant_has_so_many_keys_and_so_many_bytes(start_gateway: StartGateway, card: ModelCard) -> None:
    bounds: dict[str, Any] = {"idempotency_max_keys_per_tenant": 3, "idempotency_max_bytes_per_tenant": 1000}
    async with start_gateway([FakeEngineClient(card)], **bounds) as gateway:
        for number in range(3):
            assert (await gateway.post(CHAT, BODY, headers=keyed(f"key-{number}")))[0] == 200
        kept = [await gateway.post(CHAT, BODY, headers=keyed(f"key-{number}")) for number in range(3)]
        assert [status for status, _, _ in kept] == [200, 200, 410], "two answers have some 800 bytes"
        status, headers, answer = await gateway.post(CHAT, BODY, headers=keyed("one-more"))
        assert (status, code_of(answer), headers["retry-after"]) == (429, "idempotency_keys_exhausted", "60")
        assert (await gateway.post(CHAT, BODY))[0] == 200
        tenant_id = (await _tenant_of(gateway))["tenant_id"]
        path = f"/admin/v1/tenants/{tenant_id}/idempotency"
        status, _, answer = await gateway.request("DELETE", path, key=gateway.admin_key)
        assert (status, json.loads(answer)) == (200, {"num_keys": 3})
        assert (await gateway.post(CHAT, BODY, headers=keyed("one-more")))[0] == 200


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "caf\u00e9", "tab\there"])
async def test_an_invalid_idempotency_key_is_refused(gateway: RunningGateway, key: str) -> None:
    status, _, answer = await gateway.post(CHAT, BODY, headers=keyed(key))
    assert (status, code_of(answer)) == (400, "invalid_idempotency_key")
    assert num_generations(gateway) == 0


async def test_two_keys_at_once_are_refused(gateway: RunningGateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        headers = [("Authorization", f"Bearer {gateway.key}"), ("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
        answer = await client.post(CHAT, json=BODY, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_idempotency_key")


async def test_a_body_that_is_too_large_is_refused_as_without_a_key(gateway: RunningGateway) -> None:
    status, _, answer = await gateway.post(CHAT, b"x" * 5_000_000, headers=keyed())
    assert (status, code_of(answer)) == (413, "request_too_large")
    (row,) = await gateway.rows.wait_for(1)
    assert row.http_status == 413


async def test_tenants_have_nothing_to_do_with_one_anothers_keys(gateway: RunningGateway) -> None:
    theirs = await _new_tenants_key(gateway)
    mine = await gateway.post(CHAT, BODY, headers=keyed())
    other = await gateway.post(CHAT, {**BODY, "max_tokens": 2}, key=theirs, headers=keyed())
    assert (mine[0], other[0]) == (200, 200)
    assert "idempotent-replayed" not in other[1]
    assert (await gateway.post(CHAT, {**BODY, "max_tokens": 2}, key=theirs, headers=keyed()))[2] == other[2]
    assert (await gateway.post(CHAT, BODY, headers=keyed()))[2] == mine[2]


async def test_a_key_for_other_models_is_not_answered_with_what_it_may_not_ask_for(gateway: RunningGateway) -> None:
    assert (await gateway.post(CHAT, BODY, headers=keyed()))[0] == 200
    project_id = (await _tenant_of(gateway))["project_id"]
    fields: dict[str, Any] = {"name": "limited", "project_id": project_id, "allowed_models": ["another"]}
    made = await gateway.admin("POST", "/keys", fields, expect=201)
    status, _, answer = await gateway.post(CHAT, BODY, key=made["secret"], headers=keyed())
    assert (status, code_of(answer)) == (422, "idempotency_key_reused")


async def test_a_request_without_a_key_costs_no_statement(gateway: RunningGateway) -> None:
    said = []
    event.listen(gateway.database.engine.sync_engine, "before_cursor_execute", lambda *args: said.append(args[2]))
    for headers, is_asked in ((None, False), (keyed(), True)):
        assert (await gateway.post(CHAT, BODY, headers=headers))[0] == 200
        assert any("idempot" in statement for statement in said) == is_asked


async def test_text_and_keys_are_neither_logged_nor_stored_in_the_open(
    gateway: RunningGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    body: dict[str, Any] = {**BODY, "messages": [{"role": "user", "content": "a secret wish"}]}
    for _ in range(2):
        await gateway.post(CHAT, body, headers=keyed("order-of-a-secret-person"))
    async with gateway.database.read() as session:
        (record,) = (await session.scalars(select(IdempotentRequest))).all()
        assert b"1 2 3 4" in record.body
        assert "secret" not in repr(vars(record))
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err


async def _tenant_of(gateway: RunningGateway) -> dict[str, str]:
    _, _, answer = await gateway.request("GET", "/admin/v1/projects", key=gateway.admin_key)
    (project,) = json.loads(answer)["data"]
    return {"tenant_id": project["tenant_id"], "project_id": project["id"]}


async def _new_tenants_key(gateway: RunningGateway) -> str:
    tenant = await gateway.admin("POST", "/tenants", {"name": "another"}, expect=201)
    project = await gateway.admin("POST", "/projects", {"tenant_id": tenant["id"], "name": "p"}, expect=201)
    return (await gateway.admin("POST", "/keys", {"name": "k", "project_id": project["id"]}, expect=201))["secret"]

"""Anthropic's Message Batches with the real `anthropic` package against a gateway on loopback."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
from sqlalchemy import func, select

from moiety_platform.batches.models import Batch, BatchLine
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.files.models import FileState, StoredFile
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway, Until

MODEL = "tiny"
PATH = "/v1/messages/batches"
DEADLINE_S = 60.0


def ask(custom_id: str, text: str = "hello", **params: Any) -> Any:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 3, **params}
    return {"custom_id": custom_id, "params": asked}


async def ended(gateway: RunningGateway, batch: Any) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        while batch.processing_status != "ended":
            await asyncio.sleep(0.02)
            batch = await gateway.anthropic.messages.batches.retrieve(batch.id)
    return batch


async def results(gateway: RunningGateway, batch_id: str) -> dict[str, Any]:
    return {one.custom_id: one.result async for one in await gateway.anthropic.messages.batches.results(batch_id)}


async def test_a_batch_of_messages_is_answered_and_its_results_are_read(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway, gateway.anthropic:
        batches = gateway.anthropic.messages.batches
        asked = [ask(f"r{number}", max_tokens=1 + number % 3) for number in range(20)]
        asked[7]["params"]["max_tokens"] = 32_000  # which is lowered, as it is in a request of its own
        asked.append(ask("long", "x" * 600))
        batch = await batches.create(requests=asked)
        assert (batch.type, batch.processing_status, batch.results_url) == ("message_batch", "in_progress", None)
        assert batch.request_counts.processing == 21
        with pytest.raises(anthropic.NotFoundError, match="has not ended"):
            await gateway.anthropic.get(f"{PATH}/{batch.id}/results", cast_to=object)
        batch = await ended(gateway, batch)
        counts = batch.request_counts.model_dump()
        assert counts == {"processing": 0, "succeeded": 20, "errored": 1, "canceled": 0, "expired": 0}
        assert batch.created_at <= batch.ended_at <= batch.expires_at and batch.cancel_initiated_at is None
        found = await results(gateway, batch.id)
        assert list(found) == [one["custom_id"] for one in asked]
        for number in (0, 1, 2):
            message = found[f"r{number}"].message
            assert message.content[0].text == " ".join(str(i + 1) for i in range(1 + number))
            assert (message.usage.service_tier, message.stop_reason) == ("batch", "max_tokens")
        assert found["r7"].message.stop_reason == "model_context_window_exceeded"
        error = found["long"].error
        assert (found["long"].type, error.error.type) == ("errored", "invalid_request_error")
        assert "Shorten the prompt" in error.error.message and error.request_id.startswith("msg_")
        status, headers, raw = await gateway.request("GET", f"{PATH}/{batch.id}/results")
        assert (status, headers["content-type"].partition(";")[0], raw.count(b"\n")) == (200, "application/x-jsonl", 21)
        beta = gateway.anthropic.beta.messages.batches
        assert len([one async for one in await beta.results(batch.id)]) == 21
        openai = await gateway.client.batches.retrieve(batch.id)  # the same batch
        assert (openai.endpoint, openai.status, openai.request_counts.failed) == ("/v1/messages", "completed", 1)


async def test_an_uploaded_file_of_messages_is_a_batch_in_both_apis(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway, gateway.anthropic:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/messages", "body": ask("a")["params"]}
        file = await gateway.client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
        made = await gateway.client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/messages",
            completion_window="24h",
        )
        batch = await ended(gateway, await gateway.anthropic.messages.batches.retrieve(made.id))
        assert (await results(gateway, batch.id))["a"].message.content[0].text == "1 2 3"
        await gateway.anthropic.messages.batches.delete(batch.id)
        assert (await gateway.client.files.retrieve(file.id)).id == file.id  # the user's own file stays


async def test_a_cancelled_batch_keeps_its_answers_and_tells_what_was_canceled(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    engine = FakeEngineClient(card, lambda submit: ((65, "x") for _ in range(10**6)), token_s=0.05)
    settings = {"stores_usage": True, "batch_concurrency": 1}
    async with start_gateway([engine], **settings) as gateway, gateway.anthropic:
        batches = gateway.anthropic.messages.batches
        batch = await batches.create(
            requests=[ask("first", max_tokens=2), *(ask(f"r{n}", max_tokens=400) for n in range(4))]
        )
        await until(lambda: len(engine.submits) >= 2)
        cancelled = await batches.cancel(batch.id)
        assert cancelled.processing_status in ("canceling", "ended") and cancelled.cancel_initiated_at is not None
        batch = await ended(gateway, cancelled)
        counts = batch.request_counts
        assert counts.succeeded >= 1 and counts.canceled >= 1
        assert counts.succeeded + counts.canceled == 5 and counts.errored == 0
        kinds = [result.type for result in (await results(gateway, batch.id)).values()]
        assert (kinds.count("succeeded"), kinds.count("canceled")) == (counts.succeeded, counts.canceled)


async def test_a_batch_cancelled_at_once_has_a_result_for_every_request(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card, lambda submit: ((65, "x") for _ in range(10**6)))
    async with start_gateway([engine], stores_usage=True) as gateway, gateway.anthropic:
        batches = gateway.anthropic.messages.batches
        made = await batches.create(requests=[ask(f"r{number}", max_tokens=400) for number in range(1200)])
        batch = await ended(gateway, await batches.cancel(made.id))
        counts = batch.request_counts
        assert counts.succeeded + counts.canceled == 1200 and counts.canceled > 0
        assert set(await results(gateway, batch.id)) == {f"r{number}" for number in range(1200)}


async def test_a_deleted_batch_leaves_nothing(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True, batch_concurrency=2) as gateway:
        async with gateway.anthropic:
            batches = gateway.anthropic.messages.batches
            batch = await batches.create(requests=[ask("a")])
            with pytest.raises(anthropic.ConflictError, match="has not ended"):
                await batches.delete(batch.id)
            await ended(gateway, batch)
            assert (await batches.delete(batch.id)).type == "message_batch_deleted"
            with pytest.raises(anthropic.NotFoundError):
                await batches.retrieve(batch.id)
            with pytest.raises(anthropic.NotFoundError):
                await batches.delete(batch.id)
        async with gateway.database.read() as session:
            assert await session.scalar(select(func.count()).select_from(BatchLine)) == 0
            assert await session.scalar(select(func.count()).select_from(Batch)) == 0
            states = (await session.scalars(select(StoredFile.state))).all()
            assert set(states) <= {FileState.DELETED}


async def test_batches_are_listed_newest_first_in_both_directions(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], batch_concurrency=0) as gateway, gateway.anthropic:
        batches = gateway.anthropic.messages.batches
        made = [(await batches.create(requests=[ask("a")])).id for _ in range(5)]
        listed = [batch.id async for batch in batches.list(limit=2)]
        assert sorted(listed) == sorted(made)
        page = await batches.list(limit=2, after_id=listed[1])
        assert ([batch.id for batch in page.data], page.has_more) == (listed[2:4], True)
        page = await batches.list(limit=2, before_id=listed[3])
        assert ([batch.id for batch in page.data], page.has_more) == (listed[1:3], True)
        assert (page.first_id, page.last_id) == (listed[1], listed[2])
        for bad in ({"limit": 0}, {"after_id": "none"}, {"after_id": "a", "before_id": "b"}):
            with pytest.raises(anthropic.BadRequestError):
                await batches.list(**bad)


BAD: list[tuple[Any, str]] = [
    (b"{", "must be a JSON object"),
    (b"[]", "must be a JSON object"),
    ({"requests": []}, "is empty"),
    ({"requests": [{"custom_id": "a"}]}, "params"),
    ({"requests": [ask("")]}, "'requests.0': 'custom_id' must have"),
    ({"requests": [ask("a"), ask("a")]}, "'requests.1': the 'custom_id' 'a' was used"),
    ({"requests": [ask("a"), ask("b", max_tokens=None), ask("c", stream=True)]}, "'requests.1': 'max_tokens'"),
    ({"requests": [ask("a"), ask("b", max_tokens=None), ask("c", stream=True)]}, "'requests.2': 'stream'"),
    ({"requests": [ask("a", "x" * 3000)]}, "longer than the 2,500 bytes"),
    ({"requests": [ask(str(n)) for n in range(9)]}, "may have 8 entries"),
    (b'{"requests": [{"custom_id": "a", "params": ' + b"[" * 5000 + b"]" * 5000 + b"}]}", ""),
    (b'{"requests": [{"custom_id": "a", "params": ' + b'{"a":' * 90 + b"1" + b"}" * 90 + b"}]}", "nested deeper"),
]


async def test_bad_batches_are_refused_by_request_and_store_nothing(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)], max_body_bytes=2500, max_batch_lines=8) as gateway:
        for body, words in BAD:
            status, _, answer = await gateway.post(PATH, body)
            error = json.loads(answer)["error"]
            assert (status, error["type"]) == (400, "invalid_request_error"), error
            assert words in error["message"], error
        assert (await gateway.post(PATH, {"requests": [ask("a", "x" * 30_000)]}))[0] == 413
        async with gateway.database.read() as session:
            assert await session.scalar(select(func.count()).select_from(StoredFile)) == 0


async def test_a_tenant_has_so_many_open_batches_and_a_refused_one_leaves_no_file(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    settings = {"batch_concurrency": 0, "max_open_batches_per_tenant": 1}
    async with start_gateway([FakeEngineClient(card)], **settings) as gateway, gateway.anthropic:
        await gateway.anthropic.messages.batches.create(requests=[ask("a")])
        with pytest.raises(anthropic.RateLimitError, match="have not ended"):
            await gateway.anthropic.messages.batches.create(requests=[ask("b")])
        assert len((await gateway.client.files.list()).data) == 1


async def test_another_project_does_not_see_a_batch(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], batch_concurrency=0) as gateway, gateway.anthropic:
        batch = await gateway.anthropic.messages.batches.create(requests=[ask("a")])

        async def make(path: str, body: dict[str, Any]) -> Any:
            answer = await gateway.request("POST", f"/admin/v1{path}", json.dumps(body).encode(), gateway.admin_key)
            return json.loads(answer[2])

        tenant = await make("/tenants", {"name": "other"})
        project = await make("/projects", {"name": "p", "tenant_id": tenant["id"]})
        key = (await make("/keys", {"name": "k", "project_id": project["id"]}))["secret"]
        for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("GET", "/results")):
            assert (await gateway.request(method, f"{PATH}/{batch.id}{path}", key=key))[0] == 404
        assert json.loads((await gateway.request("GET", PATH, key=key))[2])["data"] == []
        assert (await gateway.request("GET", PATH, headers={"Authorization": None, "x-api-key": key}))[0] == 200
        assert (await gateway.request("GET", PATH, headers={"Authorization": None}))[0] == 401


async def test_a_line_reads_documents_of_the_project_and_fails_alone_for_others(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([engine := FakeEngineClient(card)], stores_usage=True) as gateway, gateway.anthropic:
        uploaded = await gateway.anthropic.beta.files.upload(file=("notes.txt", b"The sky is green."))

        def naming(custom_id: str, file_id: str) -> Any:
            asked = ask(custom_id)
            block = {"type": "document", "source": {"type": "file", "file_id": file_id}}
            asked["params"]["messages"][0]["content"] = [block, {"type": "text", "text": "What colour?"}]
            return asked

        asked = [naming("known", uploaded.id), naming("unknown", "file_none")]
        batch = await ended(gateway, await gateway.anthropic.messages.batches.create(requests=asked))
        found = await results(gateway, batch.id)
        assert (found["known"].type, found["unknown"].type) == ("succeeded", "errored")
        assert found["unknown"].error.error.type == "not_found_error"
        (submit,) = engine.submits
        assert found["known"].message.usage.input_tokens == len(submit.prompt_ids) > len("The sky is green.")

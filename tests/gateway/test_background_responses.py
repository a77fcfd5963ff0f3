"""Background responses: polled, cancelled, and failed together with their gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from sqlalchemy import func, select, update

from moiety_platform.backoff import Backoff
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import Unavailable
from moiety_platform.responses_api import background
from moiety_platform.responses_api.background import BackgroundRuns
from moiety_platform.responses_api.models import StoredResponse
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit

from .conftest import DEADLINE_S, NewCard, RunningGateway, StartGateway, always
from .test_response_tools import last_prompt

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 3}


async def ended(gateway: RunningGateway, response_id: str) -> Any:
    """Poll until the response has ended."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            response = await gateway.client.responses.retrieve(response_id)
            if response.status not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.02)


@pytest.fixture
def endless(new_card: NewCard) -> FakeEngineClient:
    def go_on(submit: Submit) -> Iterator[Any]:
        return ((65, "x" * 50) for _ in range(submit.stopping.max_tokens))

    return FakeEngineClient(new_card(max_context_tokens=10_000_000), go_on)


LONG = BODY | {"max_output_tokens": 5_000_000}


async def test_a_background_response_is_queued_at_once_and_polled_until_its_end(gateway: RunningGateway) -> None:
    queued = await gateway.client.responses.create(**BODY, background=True, metadata={"order": "7"})
    assert (queued.status, queued.background, queued.store, queued.output) == ("queued", True, True, [])
    response = await ended(gateway, queued.id)
    assert (response.status, response.output_text, response.background) == ("incomplete", "1 2 3", True)
    assert (response.usage.output_tokens, response.metadata) == (3, {"order": "7"})
    (row,) = await gateway.rows.wait_for(1)
    assert (row.request_id, row.outcome, row.http_status, row.output_tokens) == (queued.id, "length", 200, 3)
    await gateway.client.responses.create(**BODY, previous_response_id=queued.id)
    assert last_prompt(gateway) == "<|user|>hello\n<|assistant|>1 2 3\n<|user|>hello\n<|assistant|>"
    assert (await gateway.client.responses.cancel(queued.id)).status == "incomplete"


async def test_a_running_response_is_in_progress_and_can_be_cancelled(
    start_gateway: StartGateway, endless: FakeEngineClient
) -> None:
    async with start_gateway([endless]) as gateway:
        queued = await gateway.client.responses.create(**LONG, background=True)
        while (await gateway.client.responses.retrieve(queued.id)).status != "in_progress":
            pass
        with pytest.raises(openai.BadRequestError, match="still being made") as running:
            await gateway.client.responses.create(**BODY, previous_response_id=queued.id)
        assert running.value.code == "previous_response_running"
        cancelled = await gateway.client.responses.cancel(queued.id)
        assert (cancelled.status, cancelled.id) == ("cancelled", queued.id)
        _, row = await gateway.rows.wait_for(2)
        assert row.outcome == "disconnected" and row.output_tokens == endless.state.load.output_tokens_total
        assert (await gateway.client.responses.retrieve(queued.id)).status == "cancelled"
        assert endless.state.num_inflight == 0


@pytest.mark.parametrize("how", ["cancelled", "deleted"])
async def test_a_response_that_another_gateway_ends_stops_with_the_next_extension_of_its_lease(
    start_gateway: StartGateway, endless: FakeEngineClient, how: str
) -> None:
    async with start_gateway([endless]) as gateway:
        gateway.background.lease_extension.every_s = 0.05
        gateway.background.lease_extension.wake()
        queued = await gateway.client.responses.create(**LONG, background=True)
        stored = gateway.responses
        if how == "cancelled":
            body = json.dumps({**json.loads(queued.model_dump_json()), "status": "cancelled"}).encode()
            assert await stored.update_run(queued.id, body, ends=True)
        else:
            async with gateway.database.write() as session:
                await session.delete(await session.get_one(StoredResponse, queued.id))
        (row,) = await gateway.rows.wait_for(1)
        assert row.outcome == "disconnected"
        if how == "cancelled":
            assert (await ended(gateway, queued.id)).status == "cancelled"


async def test_a_response_of_a_gateway_that_died_has_failed(
    start_gateway: StartGateway, endless: FakeEngineClient
) -> None:
    async with start_gateway([endless]) as gateway:
        queued = await gateway.client.responses.create(**LONG, background=True)
        async with gateway.database.write() as session:  # as if nobody had extended its lease
            await session.execute(update(StoredResponse).values(running_until_ms=1))
        failed = await gateway.client.responses.retrieve(queued.id)
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert "has stopped" in failed.error.message
        assert (await gateway.client.responses.retrieve(queued.id)).status == "failed"
        await gateway.client.responses.delete(queued.id)


async def test_a_gateway_that_stops_leaves_its_responses_failed(
    start_gateway: StartGateway, endless: FakeEngineClient
) -> None:
    async with start_gateway([endless], drain_s=0) as gateway:
        queued = await gateway.client.responses.create(**LONG, background=True)
        await gateway.background.__aexit__()
        failed = await ended(gateway, queued.id)
        assert failed.status == "failed" and failed.error.message


async def test_errors_before_and_after_the_queue(start_gateway: StartGateway, card: ModelCard) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine]) as gateway:
        with pytest.raises(openai.BadRequestError, match="leave 'store' out"):
            await gateway.client.responses.create(**BODY, background=True, store=False)
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        with pytest.raises(openai.BadRequestError, match="no result of the call"):
            await gateway.client.responses.create(**BODY | {"input": [call]}, background=True)
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await gateway.client.responses.create(**BODY | {"model": "gpt-9"}, background=True)
        with pytest.raises(openai.BadRequestError) as too_long:
            await gateway.client.responses.create(**BODY | {"input": "x" * 600}, background=True)
        assert too_long.value.code == "context_length_exceeded"
        async with gateway.database.read() as session:
            assert await session.scalar(select(func.count()).select_from(StoredResponse)) == 0
        engine.script = always(Failed("", 0, FailureCode.ENGINE_FAILED, "no, because", 0))
        failed = await ended(gateway, (await gateway.client.responses.create(**BODY, background=True)).id)
        assert (failed.error.code, failed.error.message) == ("server_error", "no, because")


async def test_a_streamed_background_response_continues_after_a_disconnect(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], credit_window_tokens=8) as gateway:
        asked = BODY | {"max_output_tokens": 100}
        async with gateway.client.responses.stream(**asked, background=True) as stream:
            async for event in stream:
                if event.type == "response.created":
                    response_id = event.response.id
                if event.type == "response.output_text.delta":
                    break
        response = await ended(gateway, response_id)
        assert (response.status, response.usage.output_tokens) == ("incomplete", 100)
        whole = [event async for event in await gateway.client.responses.create(**BODY, background=True, stream=True)]
        assert whole[-1].response == await gateway.client.responses.retrieve(whole[-1].response.id)
        rows = await gateway.rows.wait_for(2)
        assert [row.outcome for row in rows] == ["length", "length"]


async def test_a_response_in_the_foreground_cannot_be_cancelled(gateway: RunningGateway) -> None:
    response = await gateway.client.responses.create(**BODY, store=True)
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.client.responses.cancel(response.id)
    assert refused.value.code == "response_not_cancellable"


class UnavailableService:
    """A store of responses that is unavailable for this many attempts."""

    def __init__(self, num_failures: int) -> None:
        self.left = num_failures
        self.stored: list[tuple[bytes, bool]] = []

    async def update_run(self, _response_id: str, body: bytes, *, ends: bool) -> bytes:
        self.left -= 1
        if self.left >= 0:
            raise Unavailable("the database is away")
        self.stored.append((body, ends))
        return body


async def test_the_end_of_a_response_is_stored_once_the_database_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RETRIES", Backoff(0.001, 0.002))
    service: Any = UnavailableService(4)
    runs = BackgroundRuns(service, service, drain_s=1.0)
    await runs.store_progress("resp_1", b"begun")
    assert service.stored == []  # which costs nothing but the progress
    assert await runs.store_end("resp_1", b"done") == b"done"
    assert service.stored == [(b"done", True)]
    monkeypatch.setattr(background, "LEASE_MS", 1)
    service.left = 1_000
    with pytest.raises(Unavailable):
        await runs.store_end("resp_1", b"done")


async def test_a_stop_waits_for_running_responses_no_longer_than_its_time_and_not_at_all_when_forced() -> None:
    service: Any = UnavailableService(0)
    runs = BackgroundRuns(service, service, drain_s=100.0)
    assert runs.drain_left_s() == 100.0
    runs.drain()
    assert 0.0 < runs.drain_left_s() <= 100.0
    runs.drain_s = 0.0
    assert runs.drain_left_s() == 0.0
    runs.drain_s = 100.0
    runs.drain()
    assert runs.drain_left_s() == 0.0

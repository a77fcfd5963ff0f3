"""Streams of background responses that clients resume after an event, however the responses end."""

from __future__ import annotations

import asyncio
import json
import zlib
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import delete, func, select, update

from moiety_platform.admission.gate import StreamGate
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import RateLimited, Unavailable
from moiety_platform.responses_api import resumed_streams, store
from moiety_platform.responses_api.event_log import CHUNK_BYTES, EventChunk, EventLog, numbered
from moiety_platform.responses_api.models import StoredEvents, StoredResponse
from moiety_platform.responses_api.response_service import ResponseService
from moiety_platform.responses_api.resumed_streams import ResumedStreams
from moiety_platform.responses_api.store import RunState
from moiety_wire.messages import Failed, FailureCode, ModelCard

from .conftest import DEADLINE_S, RunningGateway, StartGateway, always
from .test_background_responses import LONG, ended, endless  # noqa: F401  a fixture

BODY: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 20, "background": True, "stream": True}


async def resumed(gateway: RunningGateway, response_id: str, after: int | None = None) -> list[Any]:
    more: dict[str, Any] = {} if after is None else {"starting_after": after}
    stream = await gateway.client.responses.retrieve(response_id, stream=True, **more)
    return [event async for event in stream]


async def test_a_stream_is_resumed_after_any_event_with_the_same_events(gateway: RunningGateway) -> None:
    live = [event async for event in await gateway.client.responses.create(**BODY)]
    assert [event.sequence_number for event in live] == list(range(len(live)))
    response_id = live[0].response.id
    assert await resumed(gateway, response_id) == live
    for after in range(len(live)):
        assert await resumed(gateway, response_id, after) == live[after + 1 :]
    await gateway.client.responses.delete(response_id)
    async with gateway.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(StoredEvents)) == 0
    with pytest.raises(openai.NotFoundError):
        await resumed(gateway, response_id)


async def test_a_stream_whose_client_left_is_read_on_while_the_response_is_made(
    start_gateway: StartGateway,
    endless: FakeEngineClient,  # noqa: F811
) -> None:
    async with start_gateway([endless], credit_window_tokens=8) as gateway:
        async with await gateway.client.responses.create(**LONG, background=True, stream=True) as stream:
            seen = [await anext(stream) for _ in range(5)]
        response_id, last = seen[0].response.id, seen[-1].sequence_number
        numbers: list[int] = []
        async with (
            asyncio.timeout(DEADLINE_S),
            await gateway.client.responses.retrieve(response_id, stream=True, starting_after=last) as stream,
        ):
            async for event in stream:
                numbers.append(event.sequence_number)
                if len(numbers) == 50:
                    await gateway.client.responses.cancel(response_id)
        assert numbers == list(range(last + 1, last + 1 + len(numbers)))
        assert (event.type, event.response.status) == ("response.failed", "cancelled")


async def test_a_response_continues_when_its_events_exceed_the_limit(
    start_gateway: StartGateway,
    endless: FakeEngineClient,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[EventLog] = []
    close = EventLog.close

    def note_closed(log: EventLog) -> None:
        close(log)
        closed.append(log)

    monkeypatch.setattr(EventLog, "close", note_closed)
    monkeypatch.setattr(store, "has_capacity", always_false)
    monkeypatch.setattr(store, "STORAGE_CHECK_BYTES", 1)
    async with start_gateway([endless], credit_window_tokens=8) as gateway, asyncio.timeout(DEADLINE_S):
        async with await gateway.client.responses.create(**LONG, background=True, stream=True) as stream:
            response_id = (await anext(stream)).response.id
            while not closed:
                await anext(stream)
            seen = [await anext(stream) for _ in range(20)]
        await gateway.client.responses.cancel(response_id)
        async with gateway.database.read() as session:
            assert await session.scalar(select(func.count()).select_from(StoredEvents)) == 0
        assert closed[0].num_events > 20 and len(seen) == 20 and len(closed) == 1


async def always_false(*_: object) -> bool:
    return False


async def test_a_failed_response_ends_its_resumed_stream(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        gateway.engine.script = always(Failed("", 0, FailureCode.ENGINE_FAILED, "no, because", 0))
        with pytest.raises(openai.APIError):
            [event async for event in await gateway.client.responses.create(**BODY)]
        async with gateway.database.read() as session:
            (response_id,) = (await session.scalars(select(StoredResponse.id))).all()
        assert (await ended(gateway, response_id)).status == "failed"
        (event,) = await resumed(gateway, response_id)
        assert (event.type, event.response.error.message) == ("response.failed", "no, because")


async def test_a_response_of_a_gateway_that_died_ends_its_resumed_stream(gateway: RunningGateway) -> None:
    live = [event async for event in await gateway.client.responses.create(**BODY)]
    begun = live[0].response.model_dump_json().encode()
    async with gateway.database.write() as session:  # as if its gateway had died just before the end
        await session.execute(update(StoredResponse).values(running_until_ms=1, num_events=0, body=begun))
    events = await resumed(gateway, live[0].response.id)
    assert events[:-1] == live[:-1]
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert events[-1].sequence_number == live[-1].sequence_number


async def test_lost_events_are_reported_and_responses_without_events_refused(gateway: RunningGateway) -> None:
    live = [event async for event in await gateway.client.responses.create(**BODY)]
    async with gateway.database.write() as session:
        await session.execute(delete(StoredEvents))
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
        path = f"/v1/responses/{live[0].response.id}"
        told = (await client.get(f"{path}?stream=true&starting_after=1")).text
        data = json.loads(told.split("data: ")[1])
        assert (data["type"], data["code"], data["sequence_number"]) == ("error", "events_not_stored", 1)
        for query, status in (
            ("starting_after=1", 400),
            ("stream=yes", 400),
            ("stream=true&starting_after=x", 400),
            (f"stream=true&starting_after={2**31}", 400),
            (f"stream=true&starting_after={2**31 - 1}", 200),
            ("include[]=reasoning.encrypted_content", 200),
        ):
            assert (await client.get(f"{path}?{query}")).status_code == status, query
    quiet = await gateway.client.responses.create(**BODY | {"stream": False})
    with pytest.raises(openai.BadRequestError) as refused:
        await resumed(gateway, quiet.id)
    assert refused.value.code == "response_not_streamable"


async def test_a_resumption_after_a_failure_of_a_resumed_stream_loses_no_event(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = [event async for event in await gateway.client.responses.create(**BODY)]
    response_id = live[0].response.id

    async def away(*_: object) -> None:
        raise Unavailable("the database is away")

    for after, number in ((None, None), (2, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(ResponseService, "events", away)
            query = "" if after is None else f"&starting_after={after}"
            headers = {"authorization": f"Bearer {gateway.key}"}
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
                told = (await client.get(f"/v1/responses/{response_id}?stream=true{query}")).text
        data = json.loads(told.split("data: ")[1])
        assert (data["type"], data["code"], data.get("sequence_number")) == ("error", "unavailable", number)
        assert await resumed(gateway, response_id, number) == live[0 if number is None else number + 1 :]


class GrowingService:
    """Service of one running response, which gets an event at the third poll, and ends at the eighth."""

    num_looks = num_reads = 0

    async def run_state(self, *_: object) -> RunState:
        self.num_looks += 1
        return RunState(self.num_looks < 8, False, 1, 100 + (self.num_looks >= 3))

    async def events(self, _id: str, number: int) -> list[EventChunk]:
        self.num_reads += 1
        return [] if number or self.num_looks < 3 else [EventChunk(0, 1, zlib.compress(b"event: e\ndata: {}\n\n"))]

    async def body(self, *_: object) -> bytes:
        return b'{"status":"completed"}'


WHOSE: Any = SimpleNamespace(tenant_id="one", root_key_id="key")


async def test_events_are_read_only_when_more_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumed_streams, "POLL_S", 0.001)
    service: Any = GrowingService()
    parts = [part async for part in await ResumedStreams(service, StreamGate(9), StreamGate(9)).open(WHOSE, "r", -1)]
    assert [part.split(b"\n")[0] for part in parts[1:]] == [b"event: e", b"event: response.completed"]
    assert (service.num_looks, service.num_reads) == (8, 3)  # at first, after the growth, and at the end


async def test_a_tenant_may_open_only_so_many_resumed_streams() -> None:
    service: Any = GrowingService()
    streams = ResumedStreams(service, StreamGate(1000), StreamGate(3, "tenant", "resumed streams"))
    held = [await streams.open(WHOSE, "r", -1) for _ in range(3)]
    assert [await anext(stream) for stream in held]
    with pytest.raises(RateLimited, match="This tenant has 3 resumed streams open") as refused:
        await streams.open(WHOSE, "r", -1)
    assert (refused.value.code, refused.value.retry_after_s) == ("too_many_streams", 1.0)
    await held.pop().aclose()
    held.append(await streams.open(WHOSE, "r", -1))
    for stream in held:
        assert await anext(stream)
        await stream.aclose()


async def test_the_bound_of_resumed_streams_can_be_changed(
    start_gateway: StartGateway,
    endless: FakeEngineClient,  # noqa: F811
) -> None:
    async with start_gateway([endless], credit_window_tokens=8, max_resumed_streams_per_tenant=1) as gateway:
        made = await gateway.client.responses.create(**LONG, background=True, stream=True)
        response_id = (await anext(aiter(made))).response.id
        async with await gateway.client.responses.retrieve(response_id, stream=True):
            with pytest.raises(openai.RateLimitError, match="This tenant has 1 resumed streams open"):
                await gateway.client.responses.retrieve(response_id, stream=True)
            await gateway.live.change(gateway.live.now.model_copy(update={"max_resumed_streams_per_tenant": 2}))
            async with await gateway.client.responses.retrieve(response_id, stream=True):
                pass
        await made.close()
        await gateway.client.responses.cancel(response_id)
        await gateway.rows.wait_for(1)


async def test_a_repeated_background_request_gets_its_queued_answer_while_the_response_is_made(
    start_gateway: StartGateway,
    endless: FakeEngineClient,  # noqa: F811
) -> None:
    async with start_gateway([endless], credit_window_tokens=8) as gateway:
        key = {"idempotency-key": "one"}
        first = await gateway.client.responses.create(**LONG, background=True, extra_headers=key)
        again = await gateway.client.responses.create(**LONG, background=True, extra_headers=key)
        assert again == first and endless.state.num_inflight <= 1
        await gateway.client.responses.cancel(first.id)
        await gateway.rows.wait_for(1)


async def test_a_repeated_streamed_background_request_gets_the_events_of_the_same_response_at_any_time(
    start_gateway: StartGateway,
    endless: FakeEngineClient,  # noqa: F811
) -> None:
    async with start_gateway([endless], credit_window_tokens=8) as gateway:
        body = json.dumps({**LONG, "background": True, "stream": True, "speed": 1}).encode()
        headers = {"idempotency-key": "one"}
        first = await gateway.client.responses.create(**LONG, background=True, stream=True, extra_headers=headers)
        begun = await anext(aiter(first))
        again = await gateway.client.responses.create(**LONG, background=True, stream=True, extra_headers=headers)
        assert again.response.headers["idempotent-replayed"] == "true"
        told = [await anext(aiter(again)) for _ in range(3)]
        assert told[0] == begun and [event.sequence_number for event in told] == [0, 1, 2]
        status, _, _ = await gateway.post("/v1/responses", body, headers=headers)
        assert status == 422  # another body
        await gateway.client.responses.cancel(begun.response.id)
        await first.close()
        rest = [event async for event in again]
        assert (rest[-1].type, rest[-1].response.status) == ("response.failed", "cancelled")
        await gateway.rows.wait_for(1)
        ended_again = await gateway.client.responses.create(**LONG, background=True, stream=True, extra_headers=headers)
        assert [event async for event in ended_again] == [*told, *rest]
        assert len(endless.submits) == 1
        await gateway.client.responses.delete(begun.response.id)
        with pytest.raises(openai.NotFoundError):
            await gateway.client.responses.create(**LONG, background=True, stream=True, extra_headers=headers)


def test_a_closed_log_only_counts_its_events() -> None:
    log = EventLog()
    log.add(b"event: e\n\n", 1)
    assert log.chunks()
    log.close()
    log.add(b"event: e\n\n", 2)
    assert (log.chunks(), log.num_events) == ([], 2)


@given(st.lists(st.integers(1, CHUNK_BYTES), max_size=8), st.integers(0, 8), st.sets(st.integers(0, 8)))
def test_chunks_hold_every_event_once_whenever_they_are_taken(sizes: list[int], start: int, taken: set[int]) -> None:
    events = [b"event: e\ndata: %b\n\n" % (b"%d" % number * size)[:size] for number, size in enumerate(sizes)]
    log, chunks = EventLog(), []
    for number, event in enumerate(events):
        log.add(event, number + 1)
        if number in taken:
            chunks += log.chunks()
            log.note_stored(log.chunks())
    chunks += log.chunks()
    wanted = [chunk for chunk in chunks if chunk.next_number > start]
    assert b"".join(data for data, _ in numbered(wanted, start)) == b"".join(events[start:])

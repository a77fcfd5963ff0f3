"""External engines that answer oddly, refuse or break: what clients of each API get, what is billed, what operators
see. A small server on the loopback answers every completion with given bytes."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from structlog.testing import capture_logs

from moiety_platform.cli.doctor.engines import Settings, check_engines
from moiety_platform.clock import SystemClock
from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.external_engines.client import ExternalEngineClient, Heartbeat
from moiety_wire.messages import ModelCard

from .closing_server import ClosingServer, read_request
from .conftest import RunningGateway, SpanList, StartGateway, Until, write_tokenizer

MODEL = "tiny"
HELLO = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 30}
SELDOM = Heartbeat(interval_s=600, timeout_s=30, silence_s=60)  # asked again only where a connection breaks
LISTED: dict[str, Any] = {"id": MODEL, "object": "model", "created": 1_700_000_000.0}
KEY = "upstream-key-of-the-operator"


def event(text: str, finish: Any = None, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}).encode()


WORDS = b"".join(event(word) + b"\n\n" for word in ("one", " two", " three"))
STOP = event("", "stop") + b"\n\n"
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"
EARLY = event("", usage={"completion_tokens": 3}) + b"\n\n"
GOOD = WORDS + STOP + USAGE + DONE
FILTERED = WORDS + event("", "content_filter") + b"\n\n" + USAGE + DONE
COUNTED = len("one two three")  # by the tokenizer, which has a token for each byte


def answered(body: bytes, status: int = 200, head: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def cut(body: bytes) -> bytes:
    """An answer without a length: its end is that of the connection."""
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body


def refused(status: int, message: str = f"no: {KEY} at http://10.9.8.7:5000", head: str = "") -> bytes:
    return answered(json.dumps({"error": {"message": message}}).encode(), status, head)


class Upstream:
    """Has one model. `stays_open`: after the answer nothing comes, and the connection is not closed."""

    def __init__(self) -> None:
        self.answer = answered(GOOD)
        self.answers: list[bytes] = []  # before that one
        self.models = answered(json.dumps({"object": "list", "data": [LISTED]}).encode())
        self.stays_open = False
        self.num_asked = 0
        self.heads: list[str] = []
        self.server = ClosingServer(self._serve)

    def address(self, folder: Path) -> str:
        return (
            f"openai+http://127.0.0.1:{self.server.port}/v1?model={MODEL}&kind=generic&tokenizer={folder}&context=512"
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await read_request(reader)
                if head.startswith("get"):
                    writer.write(self.models)
                    continue
                self.num_asked += 1
                self.heads.append(head)
                writer.write(self.answers.pop() if self.answers else self.answer)
                await writer.drain()
                if self.stays_open:
                    await reader.read()
                if b"Connection: close" in self.answer or b"HTTP" not in self.answer or self.stays_open:
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    made = Upstream()
    await made.server.start()
    yield made
    await made.server.close()


@pytest.fixture
def engine(upstream: Upstream, tmp_path: Path, card: ModelCard) -> ExternalEngineClient:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_tokenizer(folder, card)
    return ExternalEngineClient(ExternalAddress.parse(upstream.address(folder)), SystemClock(), KEY, SELDOM)


@pytest.fixture
def start(
    start_gateway: StartGateway, engine: ExternalEngineClient, until: Until
) -> Callable[..., AbstractAsyncContextManager[RunningGateway]]:
    """`async with start(**settings) as gateway`: a gateway whose engine is connected."""

    class Started:
        def __init__(self, *more: Any, **settings: Any) -> None:
            self.held = start_gateway([engine], *more, failover_wait_s=0, **settings)

        async def __aenter__(self) -> Any:
            gateway = await self.held.__aenter__()
            await until(lambda: engine.state.healthy)
            return gateway

        async def __aexit__(self, *why: Any) -> None:
            await self.held.__aexit__(*why)

    return Started


def anthropic_of(gateway: RunningGateway) -> Any:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0)


ODD = {
    "gzip": (answered(gzip.compress(GOOD), head="Content-Encoding: gzip\r\n"), 3),
    "choices null": (answered(GOOD.replace(b'"choices": []', b'"choices": null')), 3),
    "choices absent": (answered(GOOD.replace(b'"choices": [], ', b"")), 3),
    "text null": (answered(WORDS + event(None, "stop") + b"\n\n" + USAGE + DONE), 3),
    "mark": (answered(b"\xef\xbb\xbf" + GOOD), 3),
    "lines by CR": (answered(GOOD.replace(b"\n", b"\r")), 3),
    "lines by CRLF": (answered(GOOD.replace(b"\n", b"\r\n")), 3),
    "count as float": (answered(GOOD.replace(b"3}", b"3.0}")), 3),
    "count as text": (answered(GOOD.replace(b"3}", b'"3"}')), 3),
    "count of nothing": (answered(GOOD.replace(b"3}", b"0}")), COUNTED),
    "count is nonsense": (answered(GOOD.replace(b"3}", b"-3.5}")), COUNTED),
    "count falls": (answered(WORDS + STOP + USAGE + USAGE.replace(b"3}", b"1}") + DONE), 3),
    "count falls before the end": (answered(EARLY + GOOD.replace(b"3}", b"1}")), 3),
    "count beyond max_tokens": (answered(GOOD.replace(b"3}", b"1000000}")), COUNTED),
    "count beyond max_tokens early": (answered(EARLY.replace(b"3}", b"99}") + GOOD), COUNTED),
    "rubbish after the end": (answered(WORDS + STOP + USAGE + b"data: {what\n\n"), 3),
    "rubbish for counts": (answered(WORDS + STOP + b"data: null\n\n"), COUNTED),
    "error after the end": (answered(WORDS + STOP + USAGE + b'data: {"error": {"code": 500}}\n\n'), 3),
    "choice null": (answered(GOOD.replace(b'"choices": []', b'"choices": [null]')), 3),
    "last line unended": (answered(WORDS + STOP.rstrip()), COUNTED),
    "cut after the end": (cut(WORDS + STOP), COUNTED),
    "empty reasons before the end": (answered(WORDS.replace(b"null", b'""') + STOP + USAGE + DONE), 3),
    "whole": (answered(event("one two three", "stop", usage={"completion_tokens": 3})[6:]), 3),
}  # fmt: skip


async def test_unusual_answers_are_relayed_and_billed_as_usual_ones(
    upstream: Upstream, start: Callable[..., AbstractAsyncContextManager[RunningGateway]]
) -> None:
    async with start() as gateway:
        for num_done, (name, (answer, num_billed)) in enumerate(ODD.items()):
            upstream.answer = answer
            choice = (await gateway.client.chat.completions.create(**ASK)).choices[0]
            assert (choice.message.content, choice.finish_reason) == ("one two three", "stop"), name
            stream = await gateway.client.chat.completions.create(**ASK, stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
            assert "".join(chunk.delta.content or "" for chunk in chunks) == "one two three", name
            assert chunks[-1].finish_reason == "stop", name
            for row in (await gateway.rows.wait_for(2 * num_done + 2))[-2:]:
                assert (row.prompt_tokens, row.output_tokens) == (gateway.prompt_tokens("hello"), num_billed), name
        assert all("accept-encoding: identity\r\n" in head for head in upstream.heads)


@pytest.mark.parametrize("body", [WORDS + STOP + USAGE, WORDS + STOP])
async def test_an_answer_ends_although_neither_done_nor_the_end_of_the_connection_comes(
    upstream: Upstream, start: Callable[..., AbstractAsyncContextManager[RunningGateway]], body: Any
) -> None:
    upstream.answer, upstream.stays_open = cut(body), True
    async with start() as gateway:
        choice = (await gateway.client.chat.completions.create(**ASK)).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("one two three", "stop")
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.output_tokens) == ("stop", 3 if USAGE in body else COUNTED)


async def test_a_server_that_ignores_max_tokens_is_left_and_max_tokens_is_billed(
    upstream: Upstream, start: Callable[..., AbstractAsyncContextManager[RunningGateway]]
) -> None:
    upstream.answer, upstream.stays_open = cut((event(" and so on") + b"\n\n") * 100), True
    async with start() as gateway:
        choice = (await gateway.client.chat.completions.create(**ASK)).choices[0]
        assert choice.finish_reason == "length"
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.output_tokens) == ("length", 30)


@pytest.mark.parametrize(
    "body",
    [
        WORDS,
        WORDS.replace(b"null", b'""'),
        WORDS + event("", "null") + b"\n\n",
        WORDS + event("", "insufficient_system_resource") + b"\n\n" + DONE,
        WORDS + event("", "error") + b"\n\n" + DONE,
        WORDS + DONE,
        WORDS + b'data: {"error": {"message": "x", "code": 500}}\n\n' + DONE,
    ],
)
async def test_an_answer_without_a_known_end_is_an_error_and_delivered_text_is_billed(
    upstream: Upstream, start: Callable[..., AbstractAsyncContextManager[RunningGateway]], body: Any
) -> None:
    upstream.answer = cut(body)
    async with start() as gateway:
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.client.chat.completions.create(**ASK)
        assert (caught.value.status_code, caught.value.code) == (502, "engine_failed")
        text = ""
        with pytest.raises(openai.APIError) as broken:
            async for chunk in await gateway.client.chat.completions.create(**ASK, stream=True):
                text += chunk.choices[0].delta.content or ""
                assert chunk.choices[0].finish_reason is None
        assert (text, broken.value.code) == ("one two three", "engine_failed")
        rows = await gateway.rows.wait_for(2)
        assert [(row.outcome, row.output_tokens) for row in rows] == [("failed", COUNTED)] * 2


async def test_a_content_filter_is_reported_in_every_api(
    upstream: Upstream, start: Callable[..., AbstractAsyncContextManager[RunningGateway]]
) -> None:
    upstream.answer = answered(FILTERED)
    async with start() as gateway:
        client, claude = gateway.client, anthropic_of(gateway)
        chat = await client.chat.completions.create(**ASK)
        streamed = [chunk async for chunk in await client.chat.completions.create(**ASK, stream=True)]
        text = await client.completions.create(model=MODEL, prompt="a", max_tokens=30)
        texts = [
            chunk
            async for chunk in await client.completions.create(model=MODEL, prompt="a", max_tokens=30, stream=True)
        ]
        for reason in (chat, streamed[-1], text, texts[-1]):
            assert reason.choices[0].finish_reason == "content_filter"
        assert chat.choices[0].message.content == text.choices[0].text == "one two three"
        message = await claude.messages.create(**ASK)
        async with claude.messages.stream(**ASK) as stream:
            told = await stream.get_final_message()
        assert (message.stop_reason, told.stop_reason) == ("refusal", "refusal")
        response = await client.responses.create(model=MODEL, input="hello", max_output_tokens=30)
        events = [one async for one in await client.responses.create(model=MODEL, input="hello", stream=True)]
        assert events[-1].type == "response.incomplete"
        for one in (response, events[-1].response):
            assert (one.status, one.incomplete_details.reason) == ("incomplete", "content_filter")
            assert [item.status for item in one.output] == ["incomplete"]
        rows = await gateway.rows.wait_for(8)
        assert {(row.outcome, row.http_status, row.output_tokens) for row in rows} == {("content_filter", 200, 3)}
        await claude.close()


async def test_a_content_filter_is_reported_in_batches(
    upstream: Upstream, start: Callable[..., AbstractAsyncContextManager[RunningGateway]]
) -> None:
    upstream.answer = answered(FILTERED)
    async with start() as gateway:
        batch = await submit(gateway)
        (line,) = await results(gateway, batch.output_file_id)
        assert line["response"]["body"]["choices"][0]["finish_reason"] == "content_filter"


async def submit(gateway: RunningGateway) -> Any:
    """Run a batch of one line, and return it after its end."""
    line: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": ASK}
    return await gateway.run_batch(json.dumps(line).encode())


async def results(gateway: RunningGateway, file_id: str) -> Any:
    return [json.loads(line) for line in (await gateway.client.files.content(file_id)).text.splitlines()]


ASKED = [
    ("/v1/chat/completions", ASK),
    ("/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": 5}),
    ("/v1/responses", {"model": MODEL, "input": "hello"}),
    ("/v1/messages", ASK),
]


async def answers_of(gateway: RunningGateway) -> AsyncIterator[tuple[str, int, Any, bytes]]:
    """Yield the path of each API, and the status, headers and body of its answer, whole and streamed."""
    for path, body in ASKED:
        for stream in (False, True):
            yield path, *await gateway.post(path, {**body, "stream": stream})


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 422])
async def test_a_refusal_tells_clients_of_each_api_not_to_retry_and_is_not_billed(
    upstream: Upstream, start: Callable[..., AbstractAsyncContextManager[RunningGateway]], status: int
) -> None:
    upstream.answer = refused(status)
    async with start() as gateway:
        async for path, got, headers, answer in answers_of(gateway):
            assert (got, headers["x-should-retry"]) == (502, "false"), path
            assert "retry-after" not in headers
            assert b"engine_refused" in answer
            assert KEY.encode() not in answer
            assert b"10.9.8.7" not in answer
        rows = await gateway.rows.wait_for(8)
        assert {(row.outcome, row.prompt_tokens, row.cost_nanodollars) for row in rows} == {("failed", 0, 0)}
        assert upstream.num_asked == 8
        retrying = gateway.client.with_options(max_retries=3)
        with pytest.raises(openai.InternalServerError):
            await retrying.chat.completions.create(**ASK)
        assert upstream.num_asked == 9


@pytest.mark.parametrize("status", [429, 503, 529])
async def test_an_overload_says_when_to_come_back_and_is_not_billed(
    upstream: Upstream, start: Callable[..., AbstractAsyncContextManager[RunningGateway]], status: int
) -> None:
    upstream.answer = refused(status, head="Retry-After: 6.5\r\n")
    async with start() as gateway:
        async for path, got, headers, answer in answers_of(gateway):
            assert (got, headers["retry-after"]) == (503, "7"), path
            assert "x-should-retry" not in headers
            assert b"engine_overloaded" in answer
        rows = await gateway.rows.wait_for(8)
        assert {(row.prompt_tokens, row.output_tokens, row.cost_nanodollars) for row in rows} == {(0, 0, 0)}


@pytest.mark.parametrize("num_answered", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_not_billed_if_one_of_its_choices_is_refused(
    upstream: Upstream,
    start: Callable[..., AbstractAsyncContextManager[RunningGateway]],
    num_answered: int,
    stream: bool,
) -> None:
    upstream.answers = [answered(GOOD)] * num_answered
    upstream.answer = refused(401)
    async with start() as gateway:
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.client.chat.completions.create(**ASK, n=2, stream=stream)
        assert caught.value.code == "engine_refused"
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.prompt_tokens, row.output_tokens) == ("failed", 0, 0)


async def test_refused_requests_leave_no_quota_reservation(
    upstream: Upstream,
    start: Callable[..., AbstractAsyncContextManager[RunningGateway]],
    engine: ExternalEngineClient,
    until: Until,
) -> None:
    async with start(stores_usage=True) as gateway:
        (tenant,) = json.loads((await gateway.request("GET", "/admin/v1/tenants", b"", gateway.admin_key))[2])["data"]
        limit: dict[str, Any] = {"level": "tenant", "scope_id": tenant["id"], "kind": "tokens_per_day", "cap": 60}
        data = json.dumps(limit).encode()
        made = json.loads((await gateway.request("PUT", "/admin/v1/quotas", data, gateway.admin_key))[2])
        broken = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\n"
        for answer in (refused(401), refused(503), refused(400), cut(b""), cut(b": waits\n\n"), broken, b"nonsense"):
            await until(lambda: engine.state.healthy)
            upstream.answer = answer
            num_asked = upstream.num_asked
            assert (await gateway.post("/v1/chat/completions", ASK))[0] in (502, 503)
            assert upstream.num_asked > num_asked
        await until(lambda: engine.state.healthy)
        await upstream.server.close()
        status, _, body = await gateway.post("/v1/chat/completions", ASK)
        assert status == 503
        assert json.loads(body)["error"]["code"] in (
            "unavailable",
            "no_engine",
        )  # is the loss known yet?
        await gateway.stored_usage.flush()
        found = await gateway.request("GET", f"/admin/v1/quotas/{made['id']}", b"", gateway.admin_key)
        assert json.loads(found[2])["used"] == 0


async def test_operators_see_what_the_server_said_without_its_secrets(
    upstream: Upstream, start: Callable[..., AbstractAsyncContextManager[RunningGateway]], spans: SpanList
) -> None:
    upstream.answer = refused(401, f"wrong key {KEY} for account 77")
    with capture_logs() as logged:
        async with start(spans) as gateway:
            await gateway.post("/v1/chat/completions", ASK)
            await gateway.rows.wait_for(1)
    (told,) = [one for one in logged if one["event"] == "engine_request_failed"]
    assert (told["upstream_status"], told["error_code"]) == (401, "engine_refused")
    assert "account 77" in told["upstream_message"]
    (attempt,) = spans.named("engine.attempt")
    assert attempt.attributes["moiety.upstream.status"] == 401
    assert "account 77" in attempt.attributes["moiety.upstream.message"]
    assert KEY not in str(logged) + str([span.attributes for span in spans.spans])


async def test_a_batch_line_that_the_server_refuses_for_what_it_asks_is_not_tried_again(
    upstream: Upstream, start: Callable[..., AbstractAsyncContextManager[RunningGateway]]
) -> None:
    upstream.answer = refused(400)
    async with start() as gateway:
        batch = await submit(gateway)
        (line,) = await results(gateway, batch.error_file_id)
        assert line["response"]["body"]["error"]["code"] == "engine_refused"
        assert upstream.num_asked == 1


@pytest.mark.parametrize(
    "models",
    [
        answered(gzip.compress(json.dumps({"data": [LISTED]}).encode()), head="Content-Encoding: gzip\r\n"),
        answered(b"\xef\xbb\xbf" + json.dumps({"data": [LISTED]}).encode()),
        answered(json.dumps([LISTED]).encode()),
        answered(json.dumps({"data": [None, {"id": 7}, {**LISTED, "max_model_len": "512"}]}).encode()),
    ],
    ids=["gzip", "mark", "bare list", "odd entries"],
)
async def test_lists_of_models_are_read_in_each_form(
    upstream: Upstream,
    start: Callable[..., AbstractAsyncContextManager[RunningGateway]],
    engine: ExternalEngineClient,
    models: Any,
    tmp_path: Path,
) -> None:
    upstream.models = models
    async with start() as gateway:
        (model,) = (await gateway.client.models.list()).data
        assert (model.id, model.created) == (MODEL, 1_700_000_000)
        assert engine.state.card.max_context_tokens == 512
        told = Settings([upstream.address(tmp_path / "checkpoint")], None)
        assert [one.level for one in await asyncio.to_thread(lambda: list(check_engines(told)))] == ["ok"]

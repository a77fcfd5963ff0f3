"""Every live setting takes effect in a running gateway, and requests in progress continue as they began."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import openai
import pytest
from sqlalchemy import select

from moiety_platform.batches.models import BatchLine
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.idempotency.models import IdempotentRequest
from moiety_platform.reloading.shown import SET, shown
from moiety_platform.responses_api.models import StoredResponse
from moiety_wire.engine_load import StepCosts
from moiety_wire.messages import Submit

from .conftest import NewCard, RunningGateway, StartGateway

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "description": "x" * 300}},
}
DEADLINE_S = 60.0
DAY_S = 86_400
_DAYS = itertools.count(1)

Look = Callable[[RunningGateway], Awaitable[object]]


def asks(path: str = CHAT, *, headers: dict[str, Any] | None = None, **fields: Any) -> Look:
    """Return a function that sends a request and returns its status and error code."""

    async def look(gateway: RunningGateway) -> tuple[Any, ...]:
        body = {**HELLO, **fields} if path == CHAT else fields
        status, _, answer = await gateway.post(path, body, headers=headers)
        return status, json.loads(answer).get("error", {}).get("code")

    return look


def endless(submit: Submit) -> Any:
    """A script without end but the request's."""
    return ((65, f"{i} ") for i in range(submit.stopping.max_tokens))


@asynccontextmanager
async def streaming(gateway: RunningGateway) -> AsyncIterator[Any]:
    """Hold a stream open within the block, and wait at its end until the gateway has ended it too."""
    stream = await gateway.client.chat.completions.create(**HELLO | {"max_tokens": 10**6}, stream=True)
    async with stream:
        first = await anext(aiter(stream))
        yield stream
    async with asyncio.timeout(DEADLINE_S):
        while first.id not in {row.request_id for row in gateway.rows.rows}:  # noqa: ASYNC110 - it is not told for one
            await asyncio.sleep(0.01)


def beside_a_stream(look: Look) -> Look:
    """Return `look` with a concurrent stream of the same key."""

    async def both(gateway: RunningGateway) -> Any:
        async with streaming(gateway):
            return await look(gateway)

    return both


async def sent(gateway: RunningGateway, data: bytes) -> bytes:
    """Send bytes until the gateway disconnects; return the first line of its answer."""
    reader, writer = await asyncio.open_connection(*gateway.address)
    writer.write(data)
    try:
        async with asyncio.timeout(DEADLINE_S):
            return (await reader.read()).partition(b"\r\n")[0]
    finally:
        writer.close()


async def status_of_slow_head(gateway: RunningGateway) -> Any:
    return await sent(gateway, b"POST /v1/chat HTTP/1.1\r\nHost: t")


async def status_of_slow_body(gateway: RunningGateway) -> Any:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {gateway.key}\r\nContent-Length: 9\r\n\r\n"
    return await sent(gateway, head.encode())


async def is_hung_up_on_when_idle(gateway: RunningGateway) -> Any:
    return await sent(gateway, b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n")


async def status_of_unread_stream(gateway: RunningGateway) -> Any:
    body = json.dumps({**HELLO, "max_tokens": 10**6, "stream": True}).encode()
    unread = socket.socket()
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    unread.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(unread, gateway.address)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {gateway.key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    await loop.sock_sendall(unread, head.encode() + body)
    async with asyncio.timeout(DEADLINE_S):
        (row,) = await gateway.rows.wait_for(1)
    unread.close()
    return row.outcome


async def first_credit(gateway: RunningGateway) -> Any:
    await gateway.post(CHAT, HELLO | {"max_tokens": 100})
    return gateway.engine.submits[-1].credit_tokens


async def is_tokenized_in_a_thread(gateway: RunningGateway) -> bool:
    class Counting(ThreadPoolExecutor):
        num_tasks = 0

        def submit(self, *args: Any, **options: Any) -> Any:
            self.num_tasks += "ModelText._encode" in repr(args)
            return super().submit(*args, **options)

    await gateway.post(COMPLETIONS, {"model": "tiny", "prompt": "x" * 40, "max_tokens": 1})  # what is done only once
    counting = Counting(2)
    asyncio.get_running_loop().set_default_executor(counting)
    await gateway.post("/tokenize", {"model": "tiny", "prompt": "x" * 40})
    return counting.num_tasks > 0


async def num_cached_tokens(gateway: RunningGateway) -> int:
    async def hits() -> int:
        _, _, text = await gateway.request("GET", "/metrics")
        return int(float(text.decode().partition('moiety_encoding_cache_tokens_total{result="hit"} ')[2].split()[0]))

    await gateway.post(CHAT, HELLO)
    before = await hits()
    await gateway.post(CHAT, HELLO)
    return await hits() - before


async def survives_its_engine(gateway: RunningGateway) -> Any:
    """Return whether a stream continues if its engine returns later than these tests let a gateway wait. If the gateway
    does not wait, no engine returns before the stream has ended."""

    async def comes_to(num_tokens: int) -> bool:
        try:
            for _ in range(num_tokens):
                await anext(stream)
        except openai.APIError:
            return False
        return True

    def num_emitted() -> int:
        return gateway.engine.state.load.output_tokens_total

    before = num_emitted()
    async with streaming(gateway) as answer:
        stream = aiter(answer)
        gateway.engine.die()
        reading = asyncio.create_task(comes_to(num_emitted() - before + 1))  # what is on its way, and another
        is_patient = gateway.live.now.failover_wait_s > DEADLINE_S / 2
        await asyncio.wait({reading}, timeout=0.5 if is_patient else DEADLINE_S)
        await gateway.engine.start()
        return await reading


def uploads(*sizes: int) -> Look:
    """Return a function that uploads files of these sizes and returns the status of the last upload."""

    async def look(gateway: RunningGateway) -> Any:
        for size in sizes:
            form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
            form += (
                b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * size + b"\r\n--b--\r\n"
            )
            headers: dict[str, Any] = {"Content-Type": "multipart/form-data; boundary=b"}
            status, _, body = await gateway.post("/v1/files", form, headers=headers)
        expires_at = json.loads(body).get("expires_at")
        return status if expires_at is None else (status, round((expires_at - time.time()) / DAY_S))

    return look


async def new_batch(gateway: RunningGateway, num_lines: int) -> Any:
    line: dict[str, Any] = {
        "method": "POST",
        "url": COMPLETIONS,
        "body": {"model": "tiny", "prompt": "x", "max_tokens": 1},
    }
    lines = "\n".join(json.dumps({"custom_id": str(i), **line}) for i in range(num_lines))
    file = await gateway.client.files.create(file=("f", lines.encode()), purpose="batch")
    return await gateway.client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")


async def end_of_a_batch(gateway: RunningGateway) -> Any:
    batch = await new_batch(gateway, 2)
    async with asyncio.timeout(DEADLINE_S):
        while batch.status not in ("completed", "failed"):
            batch = await gateway.client.batches.retrieve(batch.id)
    return batch.status


async def progress_of_a_batch(gateway: RunningGateway) -> tuple[Any, ...]:
    """Return the status of a batch that makes no progress, and its end after batches may run again."""
    batch = await new_batch(gateway, 2)
    for _ in range(5):  # polls of the worker, which is running and idle
        await asyncio.sleep(0.05)
    found = (await gateway.client.batches.retrieve(batch.id)).status
    await gateway.live.change(gateway.live.now.model_copy(update={"batch_concurrency": 4}))
    return found, await end_of_a_batch(gateway)


async def status_of_a_second_batch(gateway: RunningGateway) -> Any:
    gateway.engine.die()
    try:
        await new_batch(gateway, 1)
        await new_batch(gateway, 1)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


async def lease_of_a_line(gateway: RunningGateway) -> Any:
    """Return the minutes, rounded, for which a line that waits for its engine is leased."""
    await new_batch(gateway, 1)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with gateway.database.read() as session:
                line = await session.scalar(select(BatchLine).where(BatchLine.owner.is_not(None)))
            if line is not None and line.available_ms > time.time() * 1000:
                return round((line.available_ms / 1000 - time.time()) / 60)
            await asyncio.sleep(0.02)


async def patience_of_a_stop(gateway: RunningGateway) -> Any:
    return gateway.server.config.timeout_graceful_shutdown


async def days_of_a_kept_answer(gateway: RunningGateway) -> Any:
    await gateway.post(CHAT, HELLO, headers={"Idempotency-Key": str(time.monotonic_ns())})
    async with gateway.database.read() as session:
        expires = [row.expires_ms for row in await session.scalars(select(IdempotentRequest))]
    return round((max(expires) / 1000 - time.time()) / DAY_S)


async def replayed(gateway: RunningGateway) -> Any:
    headers: dict[str, Any] = {"Idempotency-Key": str(time.monotonic_ns())}
    await asks(headers=headers)(gateway)
    return await asks(headers=headers)(gateway)


async def with_another_key(gateway: RunningGateway) -> Any:
    return await asks(headers={"Idempotency-Key": str(time.monotonic_ns())})(gateway)


async def days_of_a_response(gateway: RunningGateway) -> tuple[Any, ...]:
    asked: dict[str, Any] = {"model": "tiny", "input": "x", "store": True, "max_output_tokens": 2}
    status, _, body = await gateway.post("/v1/responses", asked)
    if status != 200 or not json.loads(body)["store"]:
        return status, "not kept"
    async with gateway.database.read() as session:
        last = await session.scalar(select(StoredResponse).order_by(StoredResponse.id.desc()))
    return status, round((last.expires_ms / 1000 - time.time()) / DAY_S)


async def stores_unasked(gateway: RunningGateway) -> object:
    _, _, body = await gateway.post("/v1/responses", {"model": "tiny", "input": "x", "max_output_tokens": 2})
    return json.loads(body)["store"]


def deep(levels: int) -> list[Any]:
    return [deep(levels - 1)] if levels else []


OK = (200, None)
BAD = (400, "invalid_request")
NESTED: dict[str, Any] = {"metadata": None, "other": deep(8)}


async def seconds_of_a_quote(gateway: RunningGateway) -> object:
    _, _, answer = await gateway.post("/v1/quote", HELLO)
    left = datetime.fromisoformat(json.loads(answer)["expires_at"]) - datetime.now(UTC)
    return 30 * math.ceil(left.total_seconds() / 30)


async def interval_of_spot_prices(gateway: RunningGateway) -> object:
    gateway.engine.card = msgspec.structs.replace(gateway.engine.card, serves_spot=True)
    terms = {"name": "spot", "rank": 9, "completion_s": 60, "on_overload": "queue"}
    bounds = {"spot_floor_percent": 20, "spot_ceiling_percent": 90}
    await gateway.request("POST", "/admin/v1/classes", json.dumps(terms | bounds).encode(), gateway.admin_key)
    ahead_ms = next(_DAYS) * 86_400_000  # after the interval of the last price
    gateway.store_clock.ahead_ms += ahead_ms
    gateway.assembled.services.spot.forget()
    _, _, answer = await gateway.request("GET", "/v1/spot-prices")
    gateway.store_clock.ahead_ms -= ahead_ms
    (offer,) = json.loads(answer)["data"]
    begin, end = (datetime.fromisoformat(offer[name]) for name in ("starts_at", "ends_at"))
    return (end - begin).total_seconds()


async def margin_of_a_quote(gateway: RunningGateway) -> object:
    gateway.engine.step_costs = StepCosts(1.0, 0.0, (), 0.0, 0.0, 0.0)
    _, _, answer = await gateway.post("/v1/quote", HELLO)
    first = json.loads(answer)["data"][0]
    return first["guarantee"]["token_s"] / first["prediction"]["token_s"]


ROWS = [  # setting, its new value, what is looked at, what it is before and after
    ("max_body_bytes", 1024, asks(other="x" * 2000), OK, (413, "request_too_large")),
    ("max_json_depth", 4, asks(**NESTED), OK, (400, "json_too_deep")),
    ("max_messages", 1, asks(messages=HELLO["messages"] * 2), OK, BAD),
    ("max_choices", 2, asks(n=3), OK, BAD),
    ("max_stop_strings", 1, asks(stop=["q", "r"]), OK, BAD),
    ("max_stop_chars", 2, asks(stop="qrs"), OK, BAD),
    ("max_tools", 1, asks(tools=[TOOL, {**TOOL, "function": {"name": "g"}}]), (400, "tools_not_supported"), BAD),
    ("max_tool_schema_bytes", 256, asks(tools=[TOOL]), (400, "tools_not_supported"), BAD),
    ("max_grammar_bytes", 256, asks(guided_regex="(ab)" * 100), OK, (400, "unsupported_response_format")),
    ("max_header_bytes", 4096, asks(headers={"X-Long": "x" * 5000}), OK, (431, "headers_too_large")),
    ("max_headers", 16, asks(headers={f"X-{i}": "x" for i in range(20)}), OK, (431, "headers_too_large")),
    ("header_timeout_s", 0.2, status_of_slow_head, None, b"HTTP/1.1 408 Request Timeout"),
    ("body_timeout_s", 0.2, status_of_slow_body, None, b"HTTP/1.1 408 Request Timeout"),
    ("keep_alive_s", 1, is_hung_up_on_when_idle, None, b"HTTP/1.1 200 OK"),
    ("send_timeout_s", 0.2, status_of_unread_stream, None, "disconnected"),
    ("max_streams_per_key", 1, beside_a_stream(asks(stream=True)), None, (429, "too_many_streams")),
    ("max_sequences", 2, asks(n=3), OK, BAD),
    ("max_inflight_per_tenant", 1, beside_a_stream(asks()), OK, (429, "overloaded")),
    ("credit_window_tokens", 7, first_credit, 100, 7),
    ("inline_tokenize_bytes", 0, is_tokenized_in_a_thread, False, True),
    ("encoding_cache_bytes", 0, num_cached_tokens, 27, 0),
    ("failover_wait_s", 60, survives_its_engine, False, True),
    ("quote_ttl_s", 120, seconds_of_a_quote, 30, 120),
    ("quote_margin", 3.0, margin_of_a_quote, 1.5, 4.0),
    ("spot_interval_s", 5, interval_of_spot_prices, 60, 5),
    ("drain_s", 77, patience_of_a_stop, 2, 77),
    ("max_file_bytes", 1024, uploads(2000), (200, 30), 413),
    ("max_file_bytes_per_tenant", 1024, uploads(800, 800), (200, 30), 413),
    ("keep_files_days", 2, uploads(10), (200, 30), (200, 2)),
    ("max_batch_lines", 1, end_of_a_batch, "completed", "failed"),
    ("batch_concurrency", 0, progress_of_a_batch, None, ("validating", "completed")),
    ("max_open_batches_per_tenant", 1, status_of_a_second_batch, 200, 429),
    ("batch_lease_s", 600, lease_of_a_line, None, 10),
    ("idempotency_ttl_s", 3 * DAY_S, days_of_a_kept_answer, 1, 3),
    ("idempotency_max_answer_bytes", 0, replayed, OK, (410, "idempotency_answer_not_kept")),
    ("idempotency_max_bytes_per_tenant", 0, replayed, OK, (410, "idempotency_answer_not_kept")),
    ("idempotency_max_keys_per_tenant", 1, with_another_key, OK, (429, "idempotency_keys_exhausted")),
    ("responses_ttl_s", 4 * DAY_S, days_of_a_response, (200, 30), (200, 4)),
    ("responses_store_by_default", True, stores_unasked, False, True),
    ("responses_max_per_tenant", 0, days_of_a_response, (200, 30), (400, "not kept")),
    ("responses_max_bytes_per_tenant", 0, days_of_a_response, (200, 30), (429, "not kept")),
]


ALONE = {"send_timeout_s", "batch_lease_s", "drain_s", "inline_tokenize_bytes", "max_open_batches_per_tenant"}


async def taken(gateway: RunningGateway, name: str, value: object, look: Look) -> object:
    """Return what `look` sees after a change, and undo the change."""
    before = gateway.live.now
    changes = await gateway.live.change(before.model_copy(update={name: value}))
    assert (list(changes.at_once), list(changes.at_restart)) == ([name], [])
    try:
        return await look(gateway)
    finally:
        await gateway.live.change(before)


async def test_a_change_of_a_setting_takes_effect_on_requests_and_taken_back_has_none(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    async with start_gateway([FakeEngineClient(new_card(max_context_tokens=10**7), endless)]) as gateway:
        seen, wanted = {}, {}
        for name, value, look, before, after in ROWS:
            if name not in ALONE:
                seen[name] = (
                    await look(gateway) if before is not None else None,
                    await taken(gateway, name, value, look),
                )
                wanted[name] = before, after
        assert seen == wanted


@pytest.mark.parametrize(("name", "value", "look", "before", "after"), [row for row in ROWS if row[0] in ALONE])
async def test_a_change_takes_effect_where_it_needs_an_engine_of_its_own(
    start_gateway: StartGateway, new_card: NewCard, name: Any, value: Any, look: Any, before: Any, after: Any
) -> None:
    token_s = 600.0 if name == "batch_lease_s" else 0.0
    engine = FakeEngineClient(new_card(max_context_tokens=10**7), endless, token_s=token_s)
    async with start_gateway([engine]) as gateway:
        if before is not None:
            assert await look(gateway) == before
            await engine.start()
        assert await taken(gateway, name, value, look) == after


@pytest.mark.parametrize(
    "value",
    [
        "postgresql://moiety:x/y9@db/moiety",
        "postgresql+asyncpg://db/moiety?user=moiety&password=x/y9",
        "openai+https://host/v1?token=x/y9",
    ],
)
def test_no_password_is_shown_wherever_it_stands_in_an_address(value: str) -> None:
    assert "y9" not in shown(value) and SET in shown(value)
    kept = "openai+http://host/v1?key_file=/run/secrets/a"
    assert shown(kept) == kept

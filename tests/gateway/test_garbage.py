"""A request and its connection leave no garbage that only a collection finds.

A collection stops every stream of a gateway, for longer the more objects there are, and the texts and tokens of refused
requests were most of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from moiety_platform.connections import ClientConnection
from moiety_platform.engine_client.fake import FakeEngineClient, report_counts
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit
from moiety_wire.trace_events import Reason

from .conftest import NewCard, StartGateway, Until

MESSAGES = [{"role": "user", "content": "hello"}]
NUM_REQUESTS = 20


def rejects(submit: Submit) -> Any:
    return Failed(submit.request_id, 0, FailureCode.OVERLOADED, "not now", 0, Reason.PREDICTED_LATE, 2.1)


def refuses(submit: Submit) -> Any:
    return Failed(submit.request_id, 0, FailureCode.INVALID_REQUEST, "it cannot be served", 0)


def fails(submit: Submit) -> Any:
    return Failed(submit.request_id, 0, FailureCode.ENGINE_FAILED, "it broke", 0)


def breaks(submit: Submit) -> list[Any]:
    return [*report_counts(submit)[:2], fails(submit)]


@contextlib.contextmanager
def found_by_collection() -> Iterator[Counter[str]]:
    """The functions whose frames, and the types of errors, connections and requests that only a collection finds of
    what the body leaves."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        for thing in gc.garbage:
            if isinstance(thing, FrameType):
                found[thing.f_code.co_qualname] += 1
            elif isinstance(thing, BaseException | ClientConnection | RequestResponseCycle):
                found[type(thing).__name__] += 1
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("script", "changes"),
    [
        (report_counts, {}),
        (rejects, {}),
        (refuses, {}),
        (fails, {}),
        (breaks, {}),
        (report_counts, {"model": "another"}),
        (report_counts, {"max_tokens": -1}),
        (report_counts, {"max_tokens": 10_000}),
    ],
)
async def test_a_request_leaves_no_frames(
    start_gateway: StartGateway, card: ModelCard, script: Any, changes: dict[str, Any], path: str, stream: bool
) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "stream": stream, **changes}
    async with start_gateway([FakeEngineClient(card, script)]) as gateway:
        await gateway.post(path, body)  # objects that are created once
        with found_by_collection() as found:
            for _ in range(NUM_REQUESTS):
                await gateway.post(path, body)
            await asyncio.sleep(0.05)
    assert not {name: count for name, count in found.items() if count >= NUM_REQUESTS}


async def test_a_flood_of_unknown_keys_leaves_no_frames(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        unknown = [f"{gateway.key[:-4]}{number:04}" for number in range(NUM_REQUESTS)]
        for path in ("/v1/models", "/v1/chat/completions"):
            method = "GET" if path == "/v1/models" else "POST"
            await gateway.request(method, path, b"{}", "mty_none")
            with found_by_collection() as found:
                for key in unknown:
                    assert (await gateway.request(method, path, b"{}", key))[0] == 401
                await asyncio.sleep(0.05)
            assert not {name: count for name, count in found.items() if count >= NUM_REQUESTS}


def endless(submit: Submit) -> Any:
    return itertools.repeat((1, "x"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_leaves_no_frames(
    start_gateway: StartGateway, new_card: NewCard, until: Until, stream: bool
) -> None:
    engine = FakeEngineClient(new_card(max_context_tokens=10_000_000), endless)
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": stream}).encode()
    async with start_gateway([engine]) as gateway:

        async def leave() -> None:
            begun, num_rows = engine.state.load.output_tokens_total, len(gateway.rows.rows)
            _, writer = await asyncio.open_connection(*gateway.address)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {gateway.key}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: engine.state.load.output_tokens_total > begun)
            writer.close()
            await until(lambda: len(gateway.rows.rows) > num_rows)

        await leave()
        with found_by_collection() as found:
            for _ in range(NUM_REQUESTS):
                await leave()
            await asyncio.sleep(0.05)
    assert not {name: count for name, count in found.items() if count >= NUM_REQUESTS}


async def test_lines_of_a_batch_that_fail_leave_no_frames(start_gateway: StartGateway, card: ModelCard) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": asked}
    lines = [json.dumps({"custom_id": str(number), **line}).encode() for number in range(NUM_REQUESTS)]

    async with start_gateway([FakeEngineClient(card, refuses)]) as gateway:

        async def run_batch() -> None:
            batch = await gateway.run_batch(b"\n".join(lines))
            assert batch.request_counts.failed == NUM_REQUESTS

        await run_batch()
        with found_by_collection() as found:
            await run_batch()
    assert not {name: count for name, count in found.items() if count >= NUM_REQUESTS}

# ruff: noqa: F811  fixtures are imported
"""Limits of requests that count tokens or convert them: their own, and no others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway, Until
from .pdf_files import endless_pdf
from .test_documents import asking, part_of
from .test_images import CHAT
from .test_quotas import (
    HELLO,
    Limited,
    limit,
    limited,  # noqa: F401  a fixture
    used,
)

COUNTED: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": "hello"}),
    ("/v1/tokenize", {"messages": HELLO}),
    ("/detokenize", {"tokens": [65]}),
    ("/v1/detokenize", {"tokens": [65]}),
    ("/v1/messages/count_tokens", {"messages": HELLO}),
    ("/v1/responses/input_tokens", {"input": "hello"}),
    ("/v1/quote", {"messages": HELLO, "max_tokens": 4}),
]
PATHS = pytest.mark.parametrize(("path", "body"), COUNTED, ids=[path for path, _ in COUNTED])


async def count(gateway: RunningGateway, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    return await gateway.request("POST", path, json.dumps({"model": "tiny", **body}).encode())


@PATHS
async def test_token_counts_have_a_quota_of_their_own(limited: Limited, path: str, body: dict[str, Any]) -> None:
    async with limited() as gateway:
        others = [
            await limit(gateway, "tenant", 1000, "tokens_per_day"),
            await limit(gateway, "project", 1, "concurrent_requests"),
        ]
        if path != "/v1/quote":  # which takes a request from the rate, and gives it back
            others.append(await limit(gateway, "tenant", 60, "requests_per_minute"))
        await limit(gateway, "key", 6, "token_counts_per_minute")
        answers = [await count(gateway, path, body) for _ in range(8)]
        refused = [one for one in answers if one[0] != 200]
        assert 1 <= len(refused) <= 2, answers
        status, headers, answer = refused[0]
        assert status == 429 and b"rate_limit_exceeded" in answer and b"6 token_counts_per_minute" in answer
        assert 0 < int(headers["retry-after"]) <= 10
        assert (await count(gateway, path, {"model": 5}))[0] == 400, "a body that cannot be read does not count"
        assert {await used(gateway, one) for one in others} == {0}
        _, headers, _ = await gateway.post(CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 2})
        assert "tokens_per_day" in headers["ratelimit"] and "token_counts" not in headers["ratelimit"]


@PATHS
async def test_other_quotas_that_are_used_up_do_not_refuse_token_counts(
    limited: Limited, path: str, body: dict[str, Any]
) -> None:
    async with limited() as gateway:
        await limit(gateway, "key", 0, "concurrent_requests")
        if path != "/v1/quote":  # which tells what the request would cost
            await limit(gateway, "tenant", 0, "tokens_per_day")
            await limit(gateway, "key", 0, "requests_per_minute")
        assert (await count(gateway, path, body))[0] == 200


async def test_a_tenant_has_so_many_token_counts_open_and_no_more(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    slow = {"document_processes": 1, "document_cpu_s": 2.0, "max_token_counts_per_tenant": 2}
    async with start_gateway([FakeEngineClient(card)], **slow) as gateway:
        hostile = {"messages": asking(CHAT, part_of(CHAT, endless_pdf()))["messages"]}
        reading = gateway.assembled.services.documents._requests
        running = [asyncio.create_task(count(gateway, "/tokenize", hostile)) for _ in range(2)]
        await until(lambda: reading.total() == 2)
        for path, body in COUNTED:
            status, headers, answer = await count(gateway, path, body)
            assert (status, headers["retry-after"]) == (429, "1") and b"too_many_token_counts" in answer, path
        assert (await gateway.post(CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 2}))[0] == 200
        await gateway.live.change(gateway.live.now.model_copy(update={"max_token_counts_per_tenant": 3}))
        assert (await count(gateway, *COUNTED[0]))[0] == 200
        assert [status for status, _, _ in await asyncio.gather(*running)] == [400, 400]
        assert (await count(gateway, *COUNTED[0]))[0] == 200

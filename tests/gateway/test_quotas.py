"""Limits: nothing beyond them, nothing twice, and nothing left reserved."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import openai
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import ModelCard

from .conftest import NewCard, RunningGateway, StartGateway

Limited = Callable[..., AbstractAsyncContextManager[RunningGateway]]

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def limited(start_gateway: StartGateway, card: ModelCard) -> Limited:
    """`async with limited(**settings) as gateway`: a gateway that stores usage."""
    return lambda token_s=0.0, **settings: start_gateway(
        [FakeEngineClient(card, token_s=token_s)], stores_usage=True, **settings
    )


async def scopes(gateway: RunningGateway) -> dict[str, Any]:
    (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
    (project,) = (await gateway.admin("GET", "/projects"))["data"]
    key = next(key for key in (await gateway.admin("GET", "/keys"))["data"] if key["project_id"])
    return {"tenant": tenant["id"], "project": project["id"], "key": key["id"]}


async def limit(gateway: RunningGateway, level: str, cap: int, kind: str = "tokens_per_day") -> Any:
    ids = await scopes(gateway)
    return await gateway.admin("PUT", "/quotas", {"level": level, "scope_id": ids[level], "kind": kind, "cap": cap})


async def ask(gateway: RunningGateway, max_tokens: int = 5, **more: Any) -> Any:
    return await gateway.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=max_tokens, **more)


async def served(gateway: RunningGateway) -> Any:
    """Repeat a request until it is not refused; return its answer."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await ask(gateway)
            except openai.RateLimitError:
                await asyncio.sleep(0.1)


async def used(gateway: RunningGateway, quota: Any) -> Any:
    """Return the usage after all of it has been booked."""
    await gateway.stored_usage.flush()
    return (await gateway.admin("GET", f"/quotas/{quota['id']}"))["used"]


async def test_a_limit_is_used_up_and_not_exceeded(limited: Limited) -> None:
    async with limited() as gateway:
        size = (await ask(gateway)).usage.total_tokens
        quota = await limit(gateway, "tenant", 100 * size + size // 2)
        answers = await asyncio.gather(*(ask(gateway) for _ in range(130)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
        total = sum(answer.usage.total_tokens for answer in answers if not isinstance(answer, Exception))
        assert len(refused) >= 29
        assert 0.98 * quota["cap"] <= total <= quota["cap"]
        assert await used(gateway, quota) == total
        error = refused[0].response
        assert error.json()["error"]["code"] == "quota_exceeded"
        assert "limit" in error.json()["error"]["message"]
        assert 0 < int(error.headers["retry-after"]) <= 86_400


async def test_a_stream_ends_where_a_limit_has_nothing_left(limited: Limited) -> None:
    async with limited(credit_window_tokens=8) as gateway:
        size = (await ask(gateway, max_tokens=1)).usage.prompt_tokens
        quota = await limit(gateway, "key", size + 20)
        stream = await ask(gateway, max_tokens=100, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage.total_tokens == size + 20
        assert await used(gateway, quota) == size + 20
        rows = (await gateway.admin("GET", "/usage/requests"))["data"]
        assert (rows[0]["outcome"], rows[0]["error_code"]) == ("length", "quota_exceeded")


async def test_one_limit_that_refuses_costs_nothing_under_the_others(limited: Limited) -> None:
    async with limited() as gateway:
        wide, narrow = await limit(gateway, "tenant", 10_000, "tokens_per_month"), await limit(gateway, "project", 3)
        with pytest.raises(openai.RateLimitError):
            await ask(gateway)
        assert [await used(gateway, quota) for quota in (wide, narrow)] == [0, 0]
        await gateway.admin("DELETE", f"/quotas/{narrow['id']}")
        answer = await ask(gateway)
        assert await used(gateway, wide) == answer.usage.total_tokens


async def test_a_client_that_leaves_pays_for_what_was_generated_and_frees_the_rest(limited: Limited) -> None:
    async with limited(credit_window_tokens=16) as gateway:
        quota = await limit(gateway, "tenant", 100_000)
        stream = await ask(gateway, max_tokens=400, stream=True)
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(60):
            while not (rows := (await gateway.admin("GET", "/usage/requests"))["data"]):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
        (row,), total = rows, await used(gateway, quota)
        assert row["outcome"] == "disconnected"
        assert total == row["prompt_tokens"] + row["output_tokens"] < 400


async def test_limits_are_set_changed_listed_and_deleted(limited: Limited) -> None:
    async with limited() as gateway:
        ids = await scopes(gateway)
        first = await limit(gateway, "tenant", 5)
        second = await limit(gateway, "tenant", 7)
        assert (second["id"], second["cap"], second["used"], second["reserved"]) == (first["id"], 7, 0, 0)
        await limit(gateway, "key", 9)
        assert len((await gateway.admin("GET", "/quotas"))["data"]) == 2
        (only,) = (await gateway.admin("GET", f"/quotas?scope_id={ids['key']}"))["data"]
        assert (only["level"], only["cap"]) == ("key", 9)
        assert (await gateway.admin("DELETE", f"/quotas/{first['id']}"))["cap"] == 7
        await gateway.admin("GET", f"/quotas/{first['id']}", expect=404)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"level": "tenant", "scope_id": "nobody", "kind": "tokens_per_day", "cap": 1}, 404),
        ({"level": "tenant", "scope_id": "'; DROP", "kind": "tokens_per_day", "cap": 1}, 404),
        ({"level": "galaxy", "scope_id": "x", "kind": "tokens_per_day", "cap": 1}, 400),
        ({"level": "tenant", "scope_id": "x", "kind": "tokens_per_blink", "cap": 1}, 400),
        ({"level": "tenant", "scope_id": "x", "kind": "tokens_per_day", "cap": -1}, 400),
        ({"level": "tenant", "scope_id": "x", "kind": "tokens_per_day", "cap": 2**63}, 400),
    ],
)
async def test_a_limit_that_makes_no_sense_is_refused(limited: Limited, body: dict[str, Any], status: int) -> None:
    async with limited() as gateway:
        answer = await gateway.admin("PUT", "/quotas", body, expect=status)
        assert answer["error"]["message"]
        assert (await gateway.admin("GET", "/quotas"))["data"] == []


async def test_a_rate_lets_its_worth_through_and_refills(limited: Limited) -> None:
    async with limited() as gateway:
        await limit(gateway, "tenant", 30, "requests_per_minute")
        began_s = time.monotonic()
        answers = await asyncio.gather(*(ask(gateway) for _ in range(50)), return_exceptions=True)
        reload_weights = (time.monotonic() - began_s) / 2
        refused = [answer.response for answer in answers if isinstance(answer, openai.RateLimitError)]
        assert 20 - reload_weights - 1 <= len(refused) <= 20
        assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused[0].headers["retry-after"]) <= 3
        assert refused[0].headers["x-ratelimit-limit-requests"] == "30"
        assert refused[0].headers["x-ratelimit-remaining-requests"] == "0"
        assert (await served(gateway)).choices[0].finish_reason == "length"


NEVER_ENOUGH = [(f"tokens_per_{period}", 20) for period in ("minute", "day", "month")]
NO_REQUESTS = [("requests_per_minute", 0), ("concurrent_requests", 0)]


async def test_a_request_that_never_fits_is_refused_without_retry_after(limited: Limited) -> None:
    async with limited() as gateway:
        for level in ("tenant", "project", "key"):
            for kind, cap in (*NEVER_ENOUGH, *((kind, 0) for kind, _ in NEVER_ENOUGH), *NO_REQUESTS):
                made = await limit(gateway, level, cap, kind)
                with pytest.raises(openai.RateLimitError) as refused:
                    await ask(gateway)
                assert refused.value.response.json()["error"]["code"] == "request_exceeds_quota", (level, kind, cap)
                assert "retry-after" not in refused.value.response.headers
                assert refused.value.response.headers["x-should-retry"] == "false"
                await gateway.admin("DELETE", f"/quotas/{made['id']}")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5, "stream": True}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 5}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
        ("/v1/embeddings", {"input": "a"}),
    ],
    ids=["chat", "chat-stream", "completions", "responses", "messages", "embeddings"],
)
async def test_every_api_refuses_a_zero_quota_without_retry(
    start_gateway: StartGateway, new_card: NewCard, path: str, body: dict[str, Any]
) -> None:
    engine = FakeEngineClient(new_card(embedding_width=8))
    async with start_gateway([engine], stores_usage=True) as gateway:
        await gateway.admin("PUT", "/prices", PRICE)
        for kind in ("tokens_per_day", "requests_per_minute", "concurrent_requests", "money_per_day"):
            made = await limit(gateway, "tenant", 0, kind)
            status, headers, answer = await gateway.request(
                "POST", path, json.dumps({"model": "tiny", **body}).encode()
            )
            assert (status, headers["x-should-retry"], "retry-after" in headers) == (429, "false", False), (
                kind,
                answer,
            )
            assert b"allows no request at all" in answer
            if path != "/v1/messages":  # whose errors have no codes
                assert json.loads(answer)["error"]["code"] == "request_exceeds_quota"
            await gateway.admin("DELETE", f"/quotas/{made['id']}")


async def test_a_request_that_would_fit_an_unused_quota_gets_retry_after(limited: Limited) -> None:
    async with limited() as gateway:
        await limit(gateway, "tenant", 60, "tokens_per_minute")
        with pytest.raises(openai.RateLimitError) as refused:
            for _ in range(20):
                await ask(gateway)
        assert refused.value.response.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.value.response.headers["retry-after"]) >= 1


async def test_requests_that_are_refused_do_not_count_as_requests(limited: Limited) -> None:
    async with limited() as gateway:
        await limit(gateway, "key", 5, "requests_per_minute")
        for _ in range(8):
            with pytest.raises(openai.BadRequestError):
                await ask(gateway, max_tokens=1_000_000)
        assert (await ask(gateway)).usage.total_tokens


async def test_no_more_requests_are_open_at_once_than_allowed(limited: Limited) -> None:
    async with limited(token_s=0.05) as gateway:
        await limit(gateway, "project", 3, "concurrent_requests")
        streams = [await ask(gateway, max_tokens=400, stream=True) for _ in range(3)]
        for stream in streams:
            await anext(aiter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(gateway)
        assert refused.value.code == "concurrency_limit_exceeded"
        await streams[0].close()
        assert (await served(gateway)).usage.total_tokens
        for stream in streams[1:]:
            await stream.close()


async def test_a_stream_pauses_at_an_exhausted_rate_limit_and_continues(limited: Limited) -> None:
    async with limited(credit_window_tokens=8) as gateway:
        began_s = time.monotonic()
        await limit(gateway, "tenant", 480, "tokens_per_minute")  # eight a second
        first = await ask(gateway, max_tokens=410)
        second = await ask(gateway, max_tokens=40)
        took_s = time.monotonic() - began_s
        assert (second.choices[0].finish_reason, second.usage.completion_tokens) == ("length", 40)
        over = first.usage.total_tokens + second.usage.total_tokens - 480
        assert took_s >= over / 8 - 1.5


PRICE: dict[str, Any] = {"model": "tiny", "input": "2", "cached_input": "0.5", "output": "10"}


async def test_money_is_counted_to_the_nano_dollar_and_limited(limited: Limited) -> None:
    async with limited() as gateway:
        await gateway.admin("PUT", "/prices", PRICE)
        await gateway.admin("PUT", "/prices", {**PRICE, "service_class": "flex", "output": "5"})
        quota = await limit(gateway, "tenant", 10**9, "money_per_month")
        standard, flex = await ask(gateway), await ask(gateway, service_tier="flex")
        costs = [2_000 * one.usage.prompt_tokens + price * 5 for one, price in ((standard, 10_000), (flex, 5_000))]
        assert await used(gateway, quota) == sum(costs)
        rows = (await gateway.admin("GET", "/usage/requests"))["data"]
        assert [row["cost_nanodollars"] for row in reversed(rows)] == costs
        (group,) = (await gateway.admin("GET", "/usage?group_by=model"))["data"]
        assert group["totals"]["cost_nanodollars"] == sum(costs)


async def test_a_stream_ends_where_the_money_does(limited: Limited) -> None:
    async with limited(credit_window_tokens=8) as gateway:
        await gateway.admin("PUT", "/prices", PRICE)
        prompt = (await ask(gateway, max_tokens=1)).usage.prompt_tokens
        quota = await limit(gateway, "key", 2_000 * prompt + 23 * 10_000 + 9_999, "money_per_day")
        answer = await ask(gateway, max_tokens=100)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 23)
        assert await used(gateway, quota) == 2_000 * prompt + 230_000
        with pytest.raises(openai.RateLimitError, match=r"\$ 0.00 money_per_day"):
            await ask(gateway)


async def test_a_limit_on_money_lets_no_model_through_that_has_no_price(limited: Limited) -> None:
    async with limited() as gateway:
        quota = await limit(gateway, "tenant", 10**9, "money_per_day")
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await ask(gateway)
        assert refused.value.code == "model_without_price"
        await gateway.admin("PUT", "/prices", PRICE)
        await ask(gateway)
        assert (await gateway.admin("GET", f"/quotas/{quota['id']}"))["cap"] == 10**9


async def test_answers_say_where_the_limits_stand(limited: Limited) -> None:
    async with limited() as gateway:
        body = json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 5}).encode()
        _, headers, _ = await gateway.request("POST", CHAT, body)
        assert not [name for name in headers if "ratelimit" in name]
        await limit(gateway, "tenant", 60, "requests_per_minute")
        await limit(gateway, "key", 20, "requests_per_minute")
        await limit(gateway, "key", 6_000, "tokens_per_minute")
        await limit(gateway, "tenant", 100_000, "tokens_per_day")
        _, headers, _ = await gateway.request("POST", CHAT, body)
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("20", "19")
        assert headers["x-ratelimit-reset-requests"] == "3s"
        assert 5_900 < int(headers["x-ratelimit-remaining-tokens"]) < 6_000
        assert '"tokens_per_day";q=100000;w=86400' in headers["ratelimit-policy"]
        assert '"requests_per_minute";r=19;t=3' in headers["ratelimit"]


async def test_a_keys_limit_holds_for_those_it_is_rotated_to(limited: Limited) -> None:
    async with limited() as gateway:
        ids = await scopes(gateway)
        quota = await limit(gateway, "key", 1_000)
        successor = await gateway.admin("POST", f"/keys/{ids['key']}/rotate", {"grace_s": 60}, expect=201)
        client = openai.AsyncOpenAI(base_url=str(gateway.client.base_url), api_key=successor["secret"])
        answers = [await ask(gateway), await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5)]
        await client.close()
        assert await used(gateway, quota) == sum(answer.usage.total_tokens for answer in answers)
        (listed,) = (await gateway.admin("GET", f"/quotas?scope_id={successor['key']['id']}"))["data"]
        assert listed["id"] == quota["id"]


async def test_a_quota_refusal_does_not_count_as_a_missed_slo(limited: Limited) -> None:
    async with limited() as gateway:
        await limit(gateway, "tenant", 1, "requests_per_minute")
        await ask(gateway)
        with pytest.raises(openai.RateLimitError):
            await ask(gateway)
        _, _, text = await gateway.request("GET", "/metrics")
        told = [line for line in text.decode().splitlines() if line.startswith("moiety_slo_requests_total{")]
        assert sorted(line.rpartition(" ")[2] for line in told) == ["0.0", "1.0"]
        assert 'moiety_slo_requests_total{attained="true",model="tiny",service_class="standard"} 1.0' in told

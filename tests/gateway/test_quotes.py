"""Quotes over HTTP: what they say, what they bind, and the credit for a missed guarantee."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from prometheus_client import generate_latest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import Conflict
from moiety_platform.quotes.calibration import MIN_MARGINS, QuoteCalibration
from moiety_platform.quotes.quoted_request import refuse_route
from moiety_platform.quotes.timing import Timing
from moiety_wire.engine_load import ClassLoad, StepCosts

from .conftest import NewCard, RunningGateway, StartGateway, Until
from .test_document_quotas import has_read
from .test_documents import PAGES, asking, part_of
from .test_quotas import limit, used

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CHAT_PATH = "/v1/chat/completions"
PROMPT_TOKENS = RunningGateway.prompt_tokens("hi")
PRICE = {"model": "tiny", "input": "1", "output": "2"}


def class_load(name: str, predicted_ttft_s: float) -> ClassLoad:
    return ClassLoad(name, 0, 0, predicted_ttft_s, 0, {}, 0, {}, 0, 0, 0)


@pytest.fixture
def engine(new_card: NewCard) -> FakeEngineClient:
    made = FakeEngineClient(new_card("engine-1", "tiny"))
    made.step_costs = StepCosts(20.0, 0.0, (), 0.0, 0.0, 0.0)  # so long that no busy machine misses the guarantee
    return made


@pytest.fixture
async def gateway(start_gateway: StartGateway, engine: FakeEngineClient) -> AsyncIterator[RunningGateway]:
    async with start_gateway([engine], stores_usage=True) as running:
        await running.admin("PUT", "/prices", PRICE)
        await running.admin("PATCH", "/classes/standard", {"credit_percent": 25})
        yield running


async def quote_of(
    gateway: RunningGateway, body: dict[str, Any] = CHAT, endpoint: str = CHAT_PATH, expect: int = 200
) -> Any:
    status, _, answer = await gateway.post(f"/v1/quote?endpoint={endpoint}", body)
    assert status == expect, answer
    return json.loads(answer)


async def send(gateway: RunningGateway, quote: str, body: dict[str, Any] = CHAT, path: str = CHAT_PATH) -> Any:
    status, headers, answer = await gateway.post(path, body, headers={"x-moiety-quote": quote})
    return status, headers, json.loads(answer)


async def stored(gateway: RunningGateway) -> list[dict[str, Any]]:
    await gateway.stored_usage.flush()
    rows: list[dict[str, Any]] = (await gateway.admin("GET", "/usage/requests"))["data"]
    return rows


def standard(quoted: Any) -> Any:
    return next(one for one in quoted["data"] if one["service_class"] == "standard")


async def test_a_quote_has_price_times_and_guarantee_of_each_class_that_the_key_may_use(
    gateway: RunningGateway, engine: FakeEngineClient
) -> None:
    engine.class_loads = [class_load("flex", 7.0)]
    quoted = await quote_of(gateway)
    assert (quoted["prompt_tokens"], quoted["max_output_tokens"], quoted["expected_output_tokens"]) == (
        PROMPT_TOKENS, 4, 4,
    )  # fmt: skip
    assert [one["service_class"] for one in quoted["data"]] == ["standard", "flex"]
    best, flex = quoted["data"]
    most = (PROMPT_TOKENS * 10**9 + 4 * 2 * 10**9) // 10**6
    assert best["price"] == {
        "input_nanodollars": PROMPT_TOKENS * 1000, "expected_nanodollars": most, "max_nanodollars": most,
    }  # fmt: skip
    assert best["prediction"] == {
        "first_token_s": 20.0, "token_s": 20.0, "expected_finish_s": 80.0, "max_finish_s": 80.0,
    }  # fmt: skip
    assert (best["guarantee"]["first_token_s"], best["guarantee"]["token_s"]) == (20 * 1.5 + 0.25, 30)
    assert (best["credit_percent"], flex["credit_percent"]) == (25, 0)
    assert flex["prediction"]["first_token_s"] == 27.0
    assert await stored(gateway) == []  # nothing is reserved, charged or recorded


async def test_a_quoted_request_keeps_its_price_and_its_class(
    gateway: RunningGateway, engine: FakeEngineClient
) -> None:
    flex = next(one for one in (await quote_of(gateway))["data"] if one["service_class"] == "flex")
    await gateway.admin("PUT", "/prices", {"model": "tiny", "input": "100", "output": "200"})
    status, headers, _ = await send(gateway, flex["quote"])
    assert (status, headers["x-moiety-class"]) == (200, "flex")
    (row,) = await stored(gateway)
    assert (row["service_class"], row["cost_nanodollars"]) == ("flex", flex["price"]["max_nanodollars"])
    assert (row["guarantee_met"], row["credit_nanodollars"], row["credit_reason"]) == (True, 0, None)
    assert row["predicted_ttft_ms"] == 20_000 and row["predicted_duration_ms"] == 80_000
    assert engine.submits[0].service.name == "flex"


async def test_a_missed_guarantee_is_credited_once_and_the_books_agree(
    gateway: RunningGateway, engine: FakeEngineClient
) -> None:
    engine.step_costs = StepCosts(0.0, 0.0, (), 0.0, 0.0, 0.0)
    engine.token_s = 0.3  # the first token is guaranteed after 0.25 s
    one = standard(await quote_of(gateway))
    for _ in range(2):  # the second has the price, not the guarantee
        status, _, _ = await send(gateway, one["quote"])
        assert status == 200
    second, first = await stored(gateway)
    full = one["price"]["max_nanodollars"]
    credit = full * 25 // 100
    assert (first["guarantee_met"], first["credit_reason"], first["credit_nanodollars"]) == (False, "ttft", credit)
    assert first["cost_nanodollars"] == full - credit
    assert (second["guarantee_met"], second["cost_nanodollars"]) == (None, full)
    (total,) = (await gateway.admin("GET", "/usage"))["data"]
    assert total["totals"]["cost_nanodollars"] == 2 * full - credit
    assert total["totals"]["credit_nanodollars"] == credit
    assert (total["totals"]["num_guarantees"], total["totals"]["num_guarantees_met"]) == (1, 0)
    report = await gateway.admin("GET", "/usage/reconciliation")
    assert report["agrees"] and report["total"]["credit_nanodollars"] == credit
    text = generate_latest(gateway.metrics.registry).decode()
    assert 'moiety_quote_guarantees_total{met="false",model="tiny",service_class="standard"} 1.0' in text
    assert f'moiety_credit_nanodollars_total{{service_class="standard"}} {float(credit)}' in text


async def test_a_client_that_leaves_gets_no_credit(gateway: RunningGateway, engine: FakeEngineClient) -> None:
    engine.step_costs = StepCosts(0.0, 0.0, (), 0.0, 0.0, 0.0)
    one = standard(await quote_of(gateway, {**CHAT, "max_tokens": 100}))
    engine.token_s = 0.3
    reader, writer = await asyncio.open_connection(*gateway.address)
    body = json.dumps({**CHAT, "max_tokens": 100, "stream": True}).encode()
    head = (
        f"POST {CHAT_PATH} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {gateway.key}\r\n"
        f"x-moiety-quote: {one['quote']}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    while b"data:" not in await reader.readline():
        pass
    writer.close()
    async with asyncio.timeout(30):
        while not (rows := await stored(gateway)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (rows[0]["outcome"], rows[0]["guarantee_met"], rows[0]["credit_nanodollars"]) == ("disconnected", None, 0)


async def test_a_quote_does_not_depend_on_streaming_key_order_or_user(gateway: RunningGateway) -> None:
    one = standard(await quote_of(gateway))
    body = dict(reversed(CHAT.items())) | {"stream": True, "user": "ann", "service_tier": "flex"}
    status, headers, answer = await gateway.post(CHAT_PATH, body, headers={"x-moiety-quote": one["quote"]})
    assert (status, headers["x-moiety-class"]) == (200, "standard"), answer


@pytest.mark.parametrize(
    "change",
    [{"max_tokens": 5}, {"messages": [{"role": "user", "content": "ho"}]}, {"n": 2}],
)
async def test_a_quote_is_for_its_own_body(gateway: RunningGateway, change: dict[str, Any]) -> None:
    one = standard(await quote_of(gateway))
    status, _, answer = await send(gateway, one["quote"], CHAT | change)
    assert (status, answer["error"]["code"]) == (409, "quote_mismatch")


async def test_a_quote_is_for_its_own_endpoint(gateway: RunningGateway) -> None:
    one = standard(await quote_of(gateway, endpoint="/v1/messages"))
    assert (await send(gateway, one["quote"]))[0] == 409
    assert (await send(gateway, one["quote"], path="/v1/messages"))[0] == 200


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": ["ab", "cd"], "max_tokens": 3}),
        ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 4}),
        ("/v1/messages", CHAT),
    ],
)
async def test_every_text_api_can_be_quoted(gateway: RunningGateway, endpoint: str, body: dict[str, Any]) -> None:
    one = standard(await quote_of(gateway, body, endpoint))
    status, _, answer = await send(gateway, one["quote"], body, endpoint)
    assert status == 200, answer
    (row,) = await stored(gateway)
    assert (row["cost_nanodollars"], row["guarantee_met"]) == (one["price"]["max_nanodollars"], True)


async def test_quotes_that_are_forged_or_of_another_tenant_are_refused(gateway: RunningGateway) -> None:
    one = standard(await quote_of(gateway))["quote"]
    forged = one[:20] + ("A" if one[20] != "A" else "B") + one[21:]
    for text in (forged, "mtq_", "x", "mtq_" + "A" * 5000):
        status, _, answer = await send(gateway, text)
        assert (status, answer["error"]["code"]) == (400, "invalid_quote")
    tenant = await gateway.admin("POST", "/tenants", {"name": "other"}, 201)
    project = await gateway.admin("POST", "/projects", {"name": "p", "tenant_id": tenant["id"]}, 201)
    key = await gateway.admin("POST", "/keys", {"name": "k", "project_id": project["id"]}, 201)
    status, _, data = await gateway.post(CHAT_PATH, CHAT, key["secret"], {"x-moiety-quote": one})
    assert (status, json.loads(data)["error"]["code"]) == (400, "invalid_quote")


async def test_an_expired_quote_is_refused(start_gateway: StartGateway, engine: FakeEngineClient) -> None:
    async with start_gateway([engine], quote_ttl_s=0.05) as gateway:
        one = standard(await quote_of(gateway))
        async with asyncio.timeout(30):
            while (answered := await send(gateway, one["quote"]))[0] == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert (answered[0], answered[2]["error"]["code"]) == (410, "quote_expired")


async def test_without_learned_step_times_only_the_price_binds(
    gateway: RunningGateway, engine: FakeEngineClient
) -> None:
    engine.step_costs = None
    one = standard(await quote_of(gateway))
    assert (one["prediction"], one["guarantee"], one["price"] is None) == (None, None, False)
    engine.token_s = 0.05
    assert (await send(gateway, one["quote"]))[0] == 200
    (row,) = await stored(gateway)
    assert (row["guarantee_met"], row["predicted_ttft_ms"], row["credit_nanodollars"]) == (None, None, 0)


async def test_a_class_that_would_be_refused_now_has_no_guarantee(
    gateway: RunningGateway, engine: FakeEngineClient
) -> None:
    engine.class_loads = [class_load("standard", 1000.0)]
    one = standard(await quote_of(gateway))
    assert (one["is_overloaded"], one["guarantee"]) == (True, None) and one["prediction"]["first_token_s"] > 1000
    status, _, _ = await send(gateway, one["quote"])
    assert status == 429
    (row,) = await stored(gateway)
    assert (row["outcome"], row["guarantee_met"], row["credit_nanodollars"]) == ("rejected", None, 0)


async def test_a_quote_needs_a_served_endpoint_and_a_valid_body(gateway: RunningGateway) -> None:
    assert (await quote_of(gateway, endpoint="/v1/embeddings", expect=400))["error"]["param"] == "endpoint"
    assert (await quote_of(gateway, {**CHAT, "model": "none"}, expect=404))["error"]["param"] == "model"
    assert (await quote_of(gateway, {"model": "tiny"}, expect=400))["error"]["message"]


async def test_the_report_compares_predicted_with_actual_times(
    gateway: RunningGateway, engine: FakeEngineClient
) -> None:
    assert (await send(gateway, standard(await quote_of(gateway))["quote"]))[0] == 200
    engine.step_costs, engine.token_s = StepCosts(0.001, 0.0, (), 0.0, 0.0, 0.0), 0.3
    assert (await send(gateway, standard(await quote_of(gateway))["quote"]))[0] == 200
    assert (await gateway.post(CHAT_PATH, CHAT))[0] == 200  # without a quote
    await gateway.stored_usage.flush()
    (one,) = (await gateway.admin("GET", "/usage/quotes"))["data"]
    assert (one["service_class"], one["requests"], one["num_guarantees"], one["num_guarantees_met"]) == (
        "standard", 2, 2, 1,
    )  # fmt: skip
    assert one["credit_reasons"] == {"ttft": 1} and one["credit_nanodollars"] > 0
    ratio = one["ttft_ratio"]
    assert 0 < ratio["p10"] < ratio["median"] < ratio["p90"] and ratio["p90"] > 100 > ratio["p10"]
    nobody = await gateway.admin("GET", "/usage/quotes?tenant_id=ten_none")
    assert nobody["data"] == []


async def test_an_answer_that_the_clients_own_text_ended_is_charged_without_a_credit(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    secret = "AKIA" + "ABCDEFGHIJKLMNOP"
    engine = FakeEngineClient(new_card("engine-1", "tiny"), lambda submit: [(65, "word ")] * 410 + [(65, secret)])
    engine.step_costs = StepCosts(20.0, 0.0, (), 0.0, 0.0, 0.0)
    async with start_gateway([engine], stores_usage=True) as gateway:
        await gateway.admin("PUT", "/prices", PRICE)
        await gateway.admin("PATCH", "/classes/standard", {"credit_percent": 100})
        await gateway.admin("PUT", "/guardrails", {"name": "g", "stage": "output", "detectors": ["secrets"]})
        body = CHAT | {"max_tokens": 480, "stream": True}
        quote = standard(await quote_of(gateway, body))["quote"]
        status, _, answer = await gateway.post(CHAT_PATH, body, headers={"x-moiety-quote": quote})
        assert status == 200 and b"guardrail_blocked" in answer
        (row,) = await stored(gateway)
        assert (row["outcome"], row["credit_nanodollars"], row["guarantee_met"]) == ("failed", 0, None)
        assert row["cost_nanodollars"] >= 400 * 2000


async def test_quotes_of_one_idle_moment_give_one_guarantee_when_they_are_used_at_once(
    gateway: RunningGateway, engine: FakeEngineClient
) -> None:
    engine.step_costs = StepCosts(0.001, 0.0, (), 0.0, 0.0, 0.0)
    quotes = [standard(await quote_of(gateway)) for _ in range(6)]
    assert all(one["guarantee"] for one in quotes)
    engine.token_s = 0.5  # what many at once make of it
    answers = await asyncio.gather(*(send(gateway, one["quote"]) for one in quotes))
    assert {status for status, _, _ in answers} == {200}
    rows = await stored(gateway)
    assert sum(row["guarantee_met"] is not None for row in rows) == 1
    assert sum(row["credit_nanodollars"] > 0 for row in rows) == 1


async def test_guarantees_get_wider_after_many_were_missed(
    gateway: RunningGateway, engine: FakeEngineClient, until: Until
) -> None:
    engine.step_costs = StepCosts(0.0001, 0.0, (), 0.0, 0.0, 0.0)
    engine.token_s = 0.3

    def has_submitted(num_requests: int) -> bool:
        return len(engine.submits) == num_requests

    narrow = standard(await quote_of(gateway))
    assert narrow["guarantee"]["first_token_s"] == pytest.approx(0.0001 * 1.5 + 0.25)
    async with asyncio.TaskGroup() as tasks:
        for number in range(MIN_MARGINS):  # each is quoted while those before it are in flight
            tasks.create_task(send(gateway, standard(await quote_of(gateway))["quote"]))
            await until(partial(has_submitted, number + 1))
    wide = standard(await quote_of(gateway))
    assert wide["guarantee"]["first_token_s"] > wide["prediction"]["first_token_s"] * 1.5 + 0.25 + 0.01
    rows = await stored(gateway)
    assert [row["guarantee_met"] for row in rows] == [False] * MIN_MARGINS


def test_cached_prompts_do_not_teach_the_time_of_uncached_ones() -> None:
    calibration, computed = QuoteCalibration(), Timing(10.0, 0.02)
    for _ in range(30):
        calibration.observe("tiny", "standard", computed, None, 0.02)
    assert calibration.corrected("tiny", "standard", computed).first_token_s == computed.first_token_s


async def test_a_route_is_not_quoted_and_a_quote_of_a_name_that_became_a_route_is_refused(
    gateway: RunningGateway,
) -> None:
    quote = standard(await quote_of(gateway))["quote"]
    await gateway.admin("PUT", "/routes", {"name": "best", "targets": [{"model": "tiny", "weight": 1}]})
    refused = await quote_of(gateway, CHAT | {"model": "best"}, expect=400)
    assert "route" in refused["error"]["message"] and "tiny" in refused["error"]["message"]
    with pytest.raises(Conflict, match="now a route"):
        refuse_route("tiny")
    assert (await send(gateway, quote))[0] == 200


async def test_files_are_read_for_a_quote_only_within_the_tenants_limit_of_requests(
    start_gateway: StartGateway, engine: FakeEngineClient, until: Until
) -> None:
    engine.token_s = 1000.0
    async with start_gateway([engine], max_inflight_per_tenant=1) as gateway:
        running = asyncio.create_task(gateway.post(CHAT_PATH, CHAT))
        await until(lambda: bool(engine.submits))
        with_file = asking(CHAT_PATH, part_of(CHAT_PATH, b"some text")) | {"model": "tiny"}
        refused = await quote_of(gateway, with_file, expect=429)
        assert "in flight" in refused["error"]["message"]
        assert (await quote_of(gateway))["prompt_tokens"] == PROMPT_TOKENS
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_a_quote_gets_the_error_of_a_quota_that_its_request_would_exceed(
    gateway: RunningGateway,
) -> None:
    quota = await limit(gateway, "tenant", PROMPT_TOKENS)
    refused = await quote_of(gateway, expect=429)
    assert refused["error"]["code"] == "request_exceeds_quota"
    await limit(gateway, "tenant", PROMPT_TOKENS + 1)
    for _ in range(3):  # nothing stays reserved
        assert (await quote_of(gateway))["prompt_tokens"] == PROMPT_TOKENS
    assert (await gateway.post(CHAT_PATH, CHAT))[0] == 200
    assert await used(gateway, quota) == PROMPT_TOKENS + 1
    refused = await quote_of(gateway, expect=429)
    assert refused["error"]["code"] == "quota_exceeded"
    assert (await gateway.post(CHAT_PATH, CHAT))[0] == 429


async def test_a_quote_of_a_model_without_a_price_is_refused_under_a_limit_on_money(
    start_gateway: StartGateway, engine: FakeEngineClient
) -> None:
    async with start_gateway([engine], stores_usage=True) as gateway:
        assert (await quote_of(gateway))["data"][0]["price"] is None
        await limit(gateway, "key", 10**9, "money_per_day")
        refused = await quote_of(gateway, expect=403)
        assert refused["error"]["code"] == "model_without_price"


async def test_a_running_request_that_takes_the_last_slot_does_not_refuse_a_quote(
    gateway: RunningGateway, engine: FakeEngineClient, until: Until
) -> None:
    await limit(gateway, "tenant", 1, "concurrent_requests")
    engine.token_s = 1000.0
    running = asyncio.create_task(gateway.post(CHAT_PATH, CHAT))
    await until(lambda: bool(engine.submits))
    assert (await gateway.post(CHAT_PATH, CHAT))[0] == 429
    assert (await quote_of(gateway))["prompt_tokens"] == PROMPT_TOKENS
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_no_file_is_read_for_a_quote_of_a_tenant_whose_quota_is_used_up(gateway: RunningGateway) -> None:
    with_file = asking(CHAT_PATH, part_of(CHAT_PATH, PAGES)) | {"model": "tiny"}
    await limit(gateway, "tenant", 1)
    assert (await quote_of(gateway, with_file, expect=429))["error"]["code"] == "request_exceeds_quota"
    assert not has_read(gateway)
    quota = await limit(gateway, "tenant", 10)
    assert (await quote_of(gateway, with_file, expect=429))["error"]["code"] == "request_exceeds_quota"
    assert has_read(gateway)
    await limit(gateway, "tenant", 1000)
    assert (await quote_of(gateway, with_file))["prompt_tokens"] > 10
    assert await used(gateway, quota) == 0

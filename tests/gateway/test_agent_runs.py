"""Agent runs: one budget, deadline, stop switch and retention over all requests of a run, and its trace."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.agent_runs.reservation import affordable_tokens
from moiety_platform.agent_runs.terms import RunTerms, parse_run
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import BadRequest
from moiety_platform.prices.token_cost import Price
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway, StartOver
from .scripted_provider import MODEL as HOSTED_MODEL
from .scripted_provider import OPENAI, Reply, StartProvider, client_of, start_provider  # noqa: F401  a fixture

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def code_of(answer: bytes) -> str:
    return str(json.loads(answer)["error"]["code"])


async def chat(gateway: RunningGateway, run: str | None, **more: Any) -> tuple[int, dict[str, str], bytes]:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 4, **more}
    return await gateway.post(CHAT, body, headers=None if run is None else {"x-moiety-run": run})


async def run_of(gateway: RunningGateway, name: str) -> Any:
    (found,) = (await gateway.admin("GET", f"/runs?name={name}"))["data"]
    return found


async def begun(gateway: RunningGateway, name: str) -> Any:
    """Return a run once it has begun."""
    for _ in range(1000):
        if found := (await gateway.admin("GET", f"/runs?name={name}"))["data"]:
            return found[0]
        await asyncio.sleep(0.02)
    raise AssertionError("it does not begin")


async def trace_of(gateway: RunningGateway, name: str, num_ended: int) -> Any:
    """Return the trace of a run once so many of its requests have ended."""
    run_id = (await run_of(gateway, name))["id"]
    async with asyncio.timeout(20):
        while True:
            trace = await gateway.admin("GET", f"/runs/{run_id}/trace")
            if sum(one["outcome"] != "open" for one in trace["requests"]) >= num_ended:
                return trace
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("a", RunTerms("a")),
        ("a; budget-usd=2.5;keep-s=60", RunTerms("a", 2_500_000_000, None, None, 60)),
        ("a-1.b ; budget-tokens=7; deadline-s=9", RunTerms("a-1.b", None, 7, 9)),
    ],
)
def test_terms_are_parsed(text: str, terms: RunTerms) -> None:
    assert parse_run(text) == terms


@pytest.mark.parametrize(
    "text", ["", " ; a", "a b", "a; budget=1", "a; keep-s=0", "a; keep-s=1; keep-s=1", "a; budget-usd=x"]
)
def test_wrong_terms_are_refused_with_the_form(text: str) -> None:
    with pytest.raises(BadRequest, match=r"budget-usd=2\.50"):
        parse_run(text)


@given(st.integers(0, 10**9), st.integers(0, 1000), st.integers(1, 5000), st.integers(0, 10**9), st.integers(0, 10**9))
def test_affordable_tokens_never_cost_more_than_is_left(
    left: int, prompt: int, more: int, price_in: int, price_out: int
) -> None:
    price = Price(price_in, price_in, price_out)
    tokens = affordable_tokens(left, prompt, prompt + more, price)
    assert tokens <= prompt + more
    if tokens > prompt:
        assert price.cost(prompt, 0, tokens - prompt) <= left


async def test_requests_of_a_run_are_one_trace_with_their_sums(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway:
        await gateway.admin("PUT", "/prices", {"model": "tiny", "input": "1", "output": "2"})
        for path, body in (
            (CHAT, {"messages": HELLO, "max_tokens": 4}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 4}),
            ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
        ):
            status, _, answer = await gateway.post(path, {"model": "tiny", **body}, headers={"x-moiety-run": "task-1"})
            assert status == 200, answer
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "metadata": {"moiety_run": "task-1"}}
        assert (await gateway.post(CHAT, body))[0] == 200
        assert (await chat(gateway, None))[0] == 200
        trace = await trace_of(gateway, "task-1", 4)
        run, requests = trace["run"], trace["requests"]
        assert (run["status"], run["num_requests"], len(requests)) == ("active", 4, 4)
        assert [one["endpoint"] for one in requests] == [CHAT, "/v1/messages", "/v1/responses", CHAT]
        assert run["used_tokens"] == sum(one["prompt_tokens"] + one["output_tokens"] for one in requests)
        assert float(run["used_usd"]) == pytest.approx(sum(float(one["cost_usd"]) for one in requests))
        assert float(run["used_usd"]) > 0
        assert all(one["trace_id"] and one["duration_ms"] > 0 and one["start_ms"] >= 0 for one in requests)
        assert [one["start_ms"] for one in requests] == sorted(one["start_ms"] for one in requests)


async def test_a_budget_of_tokens_holds_over_concurrent_requests(start_gateway: StartGateway, card: ModelCard) -> None:
    prompt = RunningGateway.prompt_tokens("hello")
    budget = 3 * prompt + 20
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway:
        terms = f"task; budget-tokens={budget}"
        answers = await asyncio.gather(*(chat(gateway, terms, max_tokens=10) for _ in range(8)))
        statuses = [status for status, _, _ in answers]
        assert set(statuses) == {200, 403} and statuses.count(200) >= 1, statuses
        assert {code_of(answer) for status, _, answer in answers if status == 403} == {"run_budget_exhausted"}
        trace = await trace_of(gateway, "task", statuses.count(200))
        assert 0 < trace["run"]["used_tokens"] <= budget
        left = budget - trace["run"]["used_tokens"]
        if left > prompt:  # the rest goes to a shorter answer
            status, _, answer = await chat(gateway, "task", max_tokens=400)
            assert status == 200
            assert json.loads(answer)["usage"]["total_tokens"] <= left
        assert (await chat(gateway, None))[0] == 200, "other requests have no budget"


async def test_a_budget_of_money_ends_an_answer(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True, credit_window_tokens=8) as gateway:
        await gateway.admin("PUT", "/prices", {"model": "tiny", "input": "0", "output": "1000000"})
        status, _, answer = await chat(gateway, "task; budget-usd=20", max_tokens=400)
        assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 20
        status, _, answer = await chat(gateway, "task", max_tokens=4)
        assert (status, code_of(answer)) == (403, "run_budget_exhausted")
        trace = await trace_of(gateway, "task", 1)
        assert (trace["run"]["used_usd"], trace["run"]["budget_usd"]) == ("20", "20")


async def test_a_stopped_run_ends_its_open_requests_and_refuses_later_ones(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card, token_s=0.05)], stores_usage=True) as gateway:
        asked = asyncio.create_task(chat(gateway, "task", max_tokens=400, stream=True))
        other = asyncio.create_task(chat(gateway, "other", max_tokens=60))
        run = await begun(gateway, "task")
        stopped = await gateway.admin("POST", f"/runs/{run['id']}/stop")
        assert stopped["status"] == "stopped" and stopped["stopped_at"]
        status, _, answer = await asked
        assert (status, b"run_stopped" in answer) in ((200, True), (403, True)), answer
        status, _, answer = await chat(gateway, "task")
        assert (status, code_of(answer)) == (403, "run_stopped")
        assert (await other)[0] == 200


async def test_a_deadline_ends_open_requests(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card, token_s=0.05)], stores_usage=True) as gateway:
        _, _, answer = await chat(gateway, "task; deadline-s=1", max_tokens=400, stream=True)
        assert b"run_deadline_passed" in answer
        status, _, answer = await chat(gateway, "task")
        assert (status, code_of(answer)) == (403, "run_deadline_passed")
        trace = await trace_of(gateway, "task", 1)
        assert trace["requests"][0]["error_code"] == "run_deadline_passed"


async def test_terms_are_those_of_the_first_request_and_runs_are_the_tenants_own(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        assert (await chat(gateway, "task; budget-tokens=500; keep-s=60"))[0] == 200
        assert (await chat(gateway, "task"))[0] == (await chat(gateway, "task; keep-s=60"))[0] == 200
        status, _, answer = await chat(gateway, "task; budget-tokens=9000")
        assert (status, code_of(answer)) == (409, "run_terms_differ")
        assert {submit.keep_s for submit in gateway.engine.submits} == {60}
        status, _, answer = await chat(gateway, "no name")
        assert (status, code_of(answer)) == (400, "invalid_run")
        run = await run_of(gateway, "task")
        tenant = (await gateway.admin("POST", "/tenants", {"name": "other"}, expect=201))["id"]
        key = await gateway.admin(
            "POST", "/keys", {"name": "a", "role": "tenant-admin", "tenant_id": tenant}, expect=201
        )
        for path in (f"/admin/v1/runs/{run['id']}", f"/admin/v1/runs/{run['id']}/trace"):
            assert (await gateway.request("GET", path, key=key["secret"]))[0] == 404
        assert (await gateway.request("POST", f"/admin/v1/runs/{run['id']}/stop", key=key["secret"]))[0] == 404
        assert json.loads((await gateway.request("GET", "/admin/v1/runs", key=key["secret"]))[2])["data"] == []


async def test_lines_of_a_batch_join_the_run_in_their_metadata(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 4, "metadata": {"moiety_run": "nightly"}}
        line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
        await gateway.run_batch(json.dumps(line).encode())
        trace = await trace_of(gateway, "nightly", 1)
        assert trace["requests"][0]["output_tokens"] == 4


async def test_requests_that_a_quota_refuses_begin_no_run(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway:
        (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
        quota = {"level": "tenant", "scope_id": tenant["id"], "kind": "requests_per_minute", "cap": 1}
        await gateway.admin("PUT", "/quotas", quota)
        statuses = [(await chat(gateway, f"run-{number}"))[0] for number in range(5)]
        assert statuses == [200, 429, 429, 429, 429]
        assert [run["name"] for run in (await gateway.admin("GET", "/runs"))["data"]] == ["run-0"]


async def test_a_budget_of_money_needs_a_price(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway:
        status, _, answer = await chat(gateway, "task; budget-usd=0.01")
        assert (status, code_of(answer)) == (403, "model_without_price")


async def test_requests_at_once_share_a_budget_that_covers_all_of_them(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card, token_s=0.05)], stores_usage=True) as gateway:
        answers = await asyncio.gather(*(chat(gateway, "task; budget-tokens=4000") for _ in range(4)))
        assert [status for status, *_ in answers] == [200] * 4


async def test_the_name_of_the_tag_within_another_text_is_no_run(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway:
        assert (await chat(gateway, None, metadata={"note": "see moiety_run docs"}))[0] == 200
        assert (await gateway.admin("GET", "/runs"))["data"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_ends_a_request_at_a_hosted_provider_with_its_error(
    start_provider: StartProvider,  # noqa: F811
    start_over: StartOver,
    stream: bool,
) -> None:
    provider = await start_provider(OPENAI)
    provider.replies.append(Reply(("a" * 80,) * 2, hangs_after=2))
    async with start_over(client_of(provider), stores_usage=True) as gateway:
        body = {"model": HOSTED_MODEL, "messages": HELLO, "max_tokens": 100, "stream": stream}
        asked = asyncio.create_task(gateway.post(CHAT, body, headers={"x-moiety-run": "task"}))
        run = await begun(gateway, "task")
        async with asyncio.timeout(20):
            while not provider.num_hung:  # noqa: ASYNC110 - the provider announces nothing
                await asyncio.sleep(0.02)
        await gateway.admin("POST", f"/runs/{run['id']}/stop")
        status, _, answer = await asked
        assert b"run_stopped" in answer
        assert status == (200 if stream else 403)

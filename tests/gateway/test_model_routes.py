"""Routes of models through a running gateway: aliases, weights, fallbacks, downgrades, and their exact books."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from prometheus_client import generate_latest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.inference.response_headers import MODEL_HEADER, ROUTE_HEADER
from moiety_wire.messages import Failed, FailureCode, Submit
from moiety_wire.trace_events import Reason

from .conftest import NewCard, RunningGateway, StartGateway, always

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
BROKEN = always(Failed("", 1, FailureCode.ENGINE_FAILED, "no, because"))


async def set_route(gateway: RunningGateway, name: str, *models: str | tuple[str, int], **fields: Any) -> None:
    weighted = [(one, 1) if isinstance(one, str) else one for one in models]
    targets = [{"model": model, "weight": weight} for model, weight in weighted]
    await gateway.admin("PUT", "/routes", {"name": name, "targets": targets, **fields})


async def chat(gateway: RunningGateway, model: str, **more: Any) -> tuple[int, Mapping[str, str], Any]:
    body = {"model": model, "messages": HELLO, "max_tokens": 4, **more}
    status, headers, answer = await gateway.post(CHAT, body)
    return status, headers, json.loads(answer)


def engines(new_card: NewCard, *models: str) -> list[FakeEngineClient]:
    return [FakeEngineClient(new_card(f"engine-{model}", model)) for model in models]


async def test_an_alias_is_answered_by_its_target_under_the_targets_name(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    async with start_gateway(engines(new_card, "small", "large")) as gateway:
        await set_route(gateway, "best", "large")
        status, headers, answer = await chat(gateway, "best")
        assert (status, answer["model"], headers[ROUTE_HEADER], headers[MODEL_HEADER]) == (
            200,
            "large",
            "best",
            "large",
        )
        _, headers, answer = await chat(gateway, "small")
        assert answer["model"] == "small" and ROUTE_HEADER not in headers
        first, second = await gateway.rows.wait_for(2)
        assert (first.model, first.route, second.model, second.route) == ("large", "best", "small", None)
        listed = json.loads((await gateway.request("GET", "/v1/models"))[2])["data"]
        assert [one["id"] for one in listed] == ["large", "small", "best"]
        await gateway.admin("DELETE", "/routes?route=best")
        assert (await chat(gateway, "best"))[0] == 404


async def test_all_apis_and_batches_follow_a_route(start_gateway: StartGateway, new_card: NewCard) -> None:
    async with start_gateway(engines(new_card, "small")) as gateway:
        await set_route(gateway, "best", "gone", fallbacks=["small"])
        asked = {"model": "best", "max_tokens": 2, "messages": HELLO}
        answers = [
            json.loads((await gateway.post("/v1/messages", asked))[2]),
            json.loads((await gateway.post("/v1/completions", {"model": "best", "prompt": "a", "max_tokens": 2}))[2]),
            json.loads((await gateway.post("/v1/responses", {"model": "best", "input": "a"}))[2]),
        ]
        assert [one["model"] for one in answers] == ["small"] * 3
        counted = json.loads((await gateway.post("/v1/messages/count_tokens", {"model": "best", "messages": HELLO}))[2])
        assert counted["input_tokens"] == gateway.prompt_tokens("hello")
        given = {"model": "best", "input": "hello"}
        counted = json.loads((await gateway.post("/v1/responses/input_tokens", given))[2])
        assert counted["input_tokens"] == gateway.prompt_tokens("hello")
        line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": asked}
        batch = await gateway.run_batch(json.dumps(line).encode())
        assert batch.output_file_id is not None
        (output,) = (await gateway.client.files.content(batch.output_file_id)).text.splitlines()
        assert json.loads(output)["response"]["body"]["model"] == "small"


async def test_a_key_sees_what_it_has_asked_of_a_route(start_gateway: StartGateway, new_card: NewCard) -> None:
    async with start_gateway(engines(new_card, "small", "large")) as gateway:
        await set_route(gateway, "best", "small")
        await set_route(gateway, "other", "large")
        project = (await gateway.admin("GET", "/projects"))["data"][0]["id"]
        fields = {"name": "narrow", "project_id": project, "allowed_models": ["small"]}
        narrow = (await gateway.admin("POST", "/keys", fields, expect=201))["secret"]
        conversation = json.loads((await gateway.post("/v1/conversations", {}))[2])["id"]
        given = {"model": "best", "input": "a", "conversation": conversation, "max_output_tokens": 2, "store": True}
        for _ in range(2):
            status, _, answer = await gateway.post("/v1/responses", given, key=narrow)
            assert status == 200, answer
        mine = json.loads(answer)["id"]
        theirs = json.loads((await gateway.post("/v1/responses", {"model": "other", "input": "a", "store": True}))[2])[
            "id"
        ]
        assert (await gateway.request("GET", f"/v1/responses/{mine}", key=narrow))[0] == 200
        assert (await gateway.request("GET", f"/v1/responses/{theirs}", key=narrow))[0] == 404
        assert (await gateway.request("DELETE", f"/v1/responses/{mine}", key=narrow))[0] == 200


async def test_a_tenant_keeps_its_target_and_other_requests_follow_the_weights(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    async with start_gateway(engines(new_card, "small", "large")) as gateway:
        await set_route(gateway, "spread", ("small", 1), ("large", 1))
        await set_route(gateway, "tenant", ("small", 1), ("large", 1), sticky="tenant")
        await set_route(gateway, "drained", ("small", 0), ("large", 3))
        spread = Counter([(await chat(gateway, "spread"))[2]["model"] for _ in range(40)])
        assert set(spread) == {"small", "large"}
        assert len({(await chat(gateway, "tenant"))[2]["model"] for _ in range(10)}) == 1
        assert {(await chat(gateway, "drained"))[2]["model"] for _ in range(10)} == {"large"}


async def test_turns_of_a_conversation_keep_their_target(start_gateway: StartGateway, new_card: NewCard) -> None:
    async with start_gateway(engines(new_card, "small", "large")) as gateway:
        await set_route(gateway, "talk", "small", "large", sticky="conversation")
        chosen = set()
        for number in range(12):
            first: list[Any] = [{"role": "user", "content": f"conversation {number}"}]
            later = [*first, {"role": "assistant", "content": "1"}, {"role": "user", "content": "and then?"}]
            models = {(await chat(gateway, "talk", messages=turn))[2]["model"] for turn in (first, later)}
            assert len(models) == 1
            chosen |= models
        assert chosen == {"small", "large"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fallback_answers_and_only_its_tokens_are_billed(
    start_gateway: StartGateway, new_card: NewCard, stream: bool
) -> None:
    broken, good = engines(new_card, "broken", "good")
    broken.script = BROKEN
    async with start_gateway([broken, good], stores_usage=True) as gateway:
        for model, price in (("broken", "1000"), ("good", "2")):
            await gateway.admin("PUT", "/prices", {"model": model, "input": price, "output": price})
        await set_route(gateway, "safe", "broken", fallbacks=["good"])
        body = {"model": "safe", "messages": HELLO, "max_tokens": 4, "stream": stream}
        status, headers, answer = await gateway.post(CHAT, body)
        assert (status, headers[MODEL_HEADER]) == (200, "good") and b'"model":"good"' in answer
        await gateway.stored_usage.flush()
        (row,) = (await gateway.admin("GET", "/usage/requests"))["data"]
        tokens = gateway.prompt_tokens("hello") + 4
        assert (row["model"], row["route"], row["outcome"]) == ("good", "safe", "length")
        assert (row["prompt_tokens"] + row["output_tokens"], row["cost_nanodollars"]) == (tokens, tokens * 2000)
        assert (await gateway.admin("GET", "/usage/reconciliation"))["agrees"]
        assert len(broken.submits) == len(good.submits) == 1
        text = generate_latest(gateway.metrics.registry).decode()
        assert 'moiety_route_fallbacks_total{cause="engine_failed",model="broken",route="safe"} 1.0' in text
        assert 'moiety_route_requests_total{model="good",outcome="length",route="safe"} 1.0' in text


async def test_an_engine_lost_before_the_first_token_is_followed_by_the_fallback(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    lost, good = engines(new_card, "lost", "good")

    def dies(submit: Submit) -> Any:
        lost.die()
        yield 65, "a"

    lost.script = dies
    async with start_gateway([lost, good], failover_wait_s=30) as gateway:
        await set_route(gateway, "safe", "lost", fallbacks=["good"])
        status, _, answer = await chat(gateway, "safe")  # does not wait for another engine of the first model
        assert (status, answer["model"]) == (200, "good")
        (row,) = await gateway.rows.wait_for(1)
        assert (row.model, row.output_tokens) == ("good", 4)


async def test_an_overloaded_model_is_followed_by_the_fallback_and_an_error_of_the_client_is_not(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    full, good = engines(new_card, "full", "good")
    full.script = always(Failed("", 0, FailureCode.OVERLOADED, "too much", reason=Reason.PREDICTED_LATE))
    async with start_gateway([full, good]) as gateway:
        await set_route(gateway, "safe", "full", fallbacks=["good"])
        assert (await chat(gateway, "safe"))[2]["model"] == "good"
        full.script = always(Failed("", 0, FailureCode.INVALID_REQUEST, "not like this"))
        assert (await chat(gateway, "safe"))[0] == 400
        assert len(good.submits) == 1


async def test_a_failure_after_the_first_token_is_not_hidden_by_a_fallback(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    broken, good = engines(new_card, "broken", "good")

    def fails_later(submit: Submit) -> Any:
        yield 65, "a"
        yield Failed(submit.request_id, 2, FailureCode.ENGINE_FAILED, "no, because")

    broken.script = fails_later
    async with start_gateway([broken, good]) as gateway:
        await set_route(gateway, "safe", "broken", fallbacks=["good"])
        with pytest.raises(openai.APIError):
            async for _ in await gateway.client.chat.completions.create(model="safe", messages=HELLO, stream=True):
                pass
        (row,) = await gateway.rows.wait_for(1)
        assert (row.model, row.outcome, len(good.submits)) == ("broken", "failed", 0)


async def test_the_last_error_is_answered_and_a_key_without_access_sees_no_route(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    broken, good = engines(new_card, "broken", "good")
    broken.script = BROKEN
    async with start_gateway([broken, good]) as gateway:
        await set_route(gateway, "safe", "broken", fallbacks=["gone"])
        status, _, answer = await chat(gateway, "safe")
        assert (status, answer["error"]["code"]) == (502, "engine_failed")
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.prompt_tokens, row.cost_nanodollars) == ("failed", 0, 0)
        await set_route(gateway, "mixed", "broken", fallbacks=["good"])
        project = (await gateway.admin("GET", "/projects"))["data"][0]["id"]
        made = await gateway.admin(
            "POST", "/keys", {"name": "k", "project_id": project, "allowed_models": ["good"]}, expect=201
        )
        allowed = made["secret"]
        asked = {"model": "mixed", "messages": HELLO, "max_tokens": 4}
        assert json.loads((await gateway.post(CHAT, asked, allowed))[2])["model"] == "good"
        assert len(broken.submits) == 1, "the key may not use it"
        status, _, body = await gateway.post(CHAT, {**asked, "model": "safe"}, allowed)
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
        listed = json.loads((await gateway.request("GET", "/v1/models", key=allowed))[2])["data"]
        assert [one["id"] for one in listed] == ["good", "mixed"]


async def test_a_tenant_that_has_nearly_used_its_quota_gets_the_cheaper_model(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    async with start_gateway(engines(new_card, "large", "small")) as gateway:
        tokens = gateway.prompt_tokens("hello") + 4
        await set_route(gateway, "best", "large", downgrade_model="small", downgrade_percent=50)
        limit = {"level": "tenant", "kind": "tokens_per_day", "cap": 10 * tokens}
        tenant = (await gateway.admin("GET", "/tenants"))["data"][0]["id"]
        await gateway.admin("PUT", "/quotas", {**limit, "scope_id": tenant})
        models = [(await chat(gateway, "best"))[2]["model"] for _ in range(8)]
        assert models[:4] == ["large"] * 4 and models[-2:] == ["small"] * 2


async def test_names_beyond_ascii_are_encoded_in_headers(start_gateway: StartGateway, new_card: NewCard) -> None:
    async with start_gateway(engines(new_card, "m")) as gateway:
        await set_route(gateway, "modèle/é", "m")
        _, headers, _ = await chat(gateway, "modèle/é")
        assert headers[ROUTE_HEADER] == "mod%C3%A8le/%C3%A9"


async def test_copies_for_the_shadow_model_are_answered_by_nobody_and_billed_to_nobody(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    good, shadow = engines(new_card, "good", "shadow")
    shadow.token_s = 0.02
    async with start_gateway([good, shadow], stores_usage=True) as gateway:
        tenant = (await gateway.admin("GET", "/tenants"))["data"][0]["id"]
        one = gateway.prompt_tokens("hello") + 4
        limit = {"level": "tenant", "scope_id": tenant, "kind": "tokens_per_day", "cap": 2 * one}
        await gateway.admin("PUT", "/quotas", limit)
        await set_route(gateway, "tried", "good", shadow_model="shadow", shadow_percent=100)
        answers = [await chat(gateway, "tried") for _ in range(2)]
        assert [answer["model"] for _, _, answer in answers] == ["good"] * 2
        assert (await chat(gateway, "tried"))[0] == 429, "the copies have used nothing of the quota"
        assert [submit.billing_context for submit in shadow.submits] == [b"", b""]
        assert {submit.service.name for submit in shadow.submits} == {"batch"}
        if running := [task for task in asyncio.all_tasks() if task.get_name() == "shadow-request"]:
            await asyncio.wait(running)
        await gateway.stored_usage.flush()
        rows = (await gateway.admin("GET", "/usage/requests"))["data"]
        assert {row["model"] for row in rows} == {"good"}
        assert sum(row["prompt_tokens"] + row["output_tokens"] for row in rows) == 2 * one
        text = generate_latest(gateway.metrics.registry).decode()
        assert 'moiety_shadow_requests_total{model="shadow",outcome="completed",route="tried"} 2.0' in text


async def test_copies_are_dropped_above_their_number_and_under_load_and_end_with_the_gateway(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    good, shadow = engines(new_card, "good", "shadow")
    shadow.token_s = 1000.0
    async with start_gateway([good, shadow]) as gateway:
        traffic = gateway.assembled.services.shadow
        traffic.max_open = 2
        await set_route(gateway, "tried", "good", shadow_model="shadow", shadow_percent=100)
        await set_route(gateway, "rarely", "good", shadow_model="shadow", shadow_percent=0.001)
        assert [(await chat(gateway, "tried"))[0] for _ in range(3)] == [200] * 3
        assert (await chat(gateway, "rarely"))[0] == 200
        assert traffic.num_open == 2
        text = generate_latest(gateway.metrics.registry).decode()
        assert 'moiety_shadow_requests_total{model="shadow",outcome="dropped",route="tried"} 1.0' in text
        assert 'route="rarely"} ' not in text.split("moiety_shadow_requests_total")[-1]
    assert traffic.num_open == 0 and not shadow.state.num_inflight


async def test_copies_for_the_shadow_model_take_no_place_of_their_tenant(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    good, shadow = engines(new_card, "good", "shadow")
    shadow.token_s = 1000.0
    async with start_gateway([good, shadow], max_inflight_per_tenant=8) as gateway:
        await set_route(gateway, "tried", "good", shadow_model="shadow", shadow_percent=100)
        for _ in range(12):
            assert (await chat(gateway, "tried"))[0] == 200
        assert (await chat(gateway, "good", n=4))[0] == 200

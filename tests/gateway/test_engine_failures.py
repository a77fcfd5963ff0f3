"""Engines that refuse, fail or die: clients get a typed error, or an error event in a stream that has begun."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit

from .conftest import NewCard, RunningGateway, StartGateway

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("code", "error", "status"),
    [
        (FailureCode.INVALID_REQUEST, openai.BadRequestError, 400),
        (FailureCode.UNKNOWN_MODEL, openai.NotFoundError, 404),
        (FailureCode.CONTEXT_LENGTH_EXCEEDED, openai.BadRequestError, 400),
        (FailureCode.OVERLOADED, openai.InternalServerError, 503),
        (FailureCode.DRAINING, openai.InternalServerError, 503),
        (FailureCode.ENGINE_FAILED, openai.InternalServerError, 502),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_of_the_engine_has_its_status_even_if_a_stream_was_asked_for(
    start_gateway: StartGateway, card: ModelCard, code: Any, error: Any, status: int, stream: bool
) -> None:
    engine = FakeEngineClient(card, lambda submit: Failed(submit.request_id, 1, code, "no, because"))
    async with start_gateway([engine]) as gateway:
        with pytest.raises(error, match="no, because") as caught:
            await gateway.client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
        assert caught.value.status_code == status
        assert ("retry-after" in caught.value.response.headers) == (status == 503)
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.output_tokens) == ("failed", status, 0)


async def test_an_engine_lost_during_a_stream_gives_an_error_event_without_done(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    def stalls_at_its_credit(submit: Submit) -> Any:
        return ((65, "x") for _ in range(10_000))

    engine = FakeEngineClient(card, stalls_at_its_credit)
    async with start_gateway([engine], credit_window_tokens=8) as gateway:
        stream = await gateway.client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    engine.die()
        assert caught.value.code == "engine_failed"
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("failed", 200, "engine_failed")
        assert row.output_tokens > 0
        status, _, answer = await gateway.post(CHAT, {"model": "tiny", "messages": HELLO})
        assert (status, json.loads(answer)["error"]["code"]) == (503, "no_engine")
        await engine.start()
        assert (await gateway.post(CHAT, {"model": "tiny", "messages": HELLO}))[0] == 200


async def test_the_error_event_is_the_last_thing_in_the_stream(start_gateway: StartGateway, card: ModelCard) -> None:
    def fails_after_two(submit: Submit) -> Iterator[tuple[Any, ...]]:
        yield 65, "a"
        yield 66, "b"
        engine.die()
        yield 67, "c"

    engine = FakeEngineClient(card, fails_after_two)
    async with start_gateway([engine]) as gateway:
        body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "stream": True}
        status, headers, answer = await gateway.post(CHAT, body)
        events = [event.removeprefix(b"data: ") for event in answer.strip().split(b"\n\n")]
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert json.loads(events[-1])["error"]["code"] == "engine_failed"
        assert b"[DONE]" not in answer


async def test_one_of_two_replicas_may_die_and_the_other_serves(start_gateway: StartGateway, new_card: NewCard) -> None:
    first, second = FakeEngineClient(new_card("a")), FakeEngineClient(new_card("b"))
    async with start_gateway([first, second]) as gateway:
        await first.close()
        for _ in range(3):
            await gateway.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1)
        assert (len(first.submits), len(second.submits)) == (0, 3)


async def test_readiness_follows_the_engines(gateway: RunningGateway) -> None:
    assert (await gateway.request("GET", "/readyz"))[0] == 200
    gateway.engine.die()
    status, headers, answer = await gateway.request("GET", "/readyz")
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(answer)["reasons"] == ["engine fake://engine-1: stopped"]
    assert (await gateway.request("GET", "/healthz"))[0] == 200


async def test_administrators_see_engines_and_others_do_not(gateway: RunningGateway) -> None:
    status, _, answer = await gateway.request("GET", "/admin/v1/engines", key=gateway.admin_key)
    (engine,) = json.loads(answer)["data"]
    assert (status, engine["healthy"], engine["card"]["model"]) == (200, True, "tiny")
    assert engine["load"]["num_running"] == 0
    assert "tokenizer_json" not in engine["card"]
    assert (await gateway.request("GET", "/admin/v1/engines"))[0] == 403


async def test_the_number_of_expert_ranks_of_an_engine_is_changed_and_noted(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = [FakeEngineClient(new_card(name)) for name in ("with", "without", "can have")]
    engines[0].expert_ranks, engines[2].can_change_expert_ranks = 2, True
    async with start_gateway(engines) as gateway:

        async def scale(engine_id: str, body: dict[str, Any]) -> tuple[int, Any]:
            path = f"/admin/v1/engines/{engine_id}/expert-ranks"
            status, _, answer = await gateway.request("POST", path, json.dumps(body).encode(), key=gateway.admin_key)
            return status, json.loads(answer)

        status, before = await scale("with", {"num_ranks": 3})
        assert (status, before["load"]["expert_ranks"]) == (202, 2)
        assert engines[0].expert_ranks == 3
        assert (await scale("with", {"num_ranks": -1}))[0] == 400
        assert (await scale("none", {"num_ranks": 3}))[0] == 404
        status, refused = await scale("without", {"num_ranks": 3})
        assert status == 409 and "--ffn-ranks" in refused["error"]["message"]
        status, before = await scale("can%20have", {"num_ranks": 1})
        assert (status, before["load"]["expert_ranks"], engines[2].expert_ranks) == (202, 0, 1)
        assert (await scale("can%20have", {"num_ranks": 0}))[0] == 202
        assert engines[2].expert_ranks == 0
        _, _, log = await gateway.request("GET", "/admin/v1/audit", key=gateway.admin_key)
        noted = next(one for one in json.loads(log)["data"] if one["object_kind"] == "engines")
        assert (noted["before"], noted["after"]) == ({"expert_ranks": 2}, {"requested_expert_ranks": 3})


async def test_a_model_whose_engines_sleep_is_answered_with_503_and_when_to_come_back_until_one_is_woken(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = [FakeEngineClient(new_card("one")), FakeEngineClient(new_card("two"))]
    ask: dict[str, Any] = {"model": "tiny", "messages": HELLO}
    async with start_gateway(engines) as gateway:

        async def tell(engine_id: str, what: Any) -> tuple[Any, ...]:
            path = f"/admin/v1/engines/{engine_id}/{what}"
            status, _, answer = await gateway.request("POST", path, key=gateway.admin_key)
            return status, json.loads(answer)

        assert (await tell("one", "sleep"))[0] == 202
        assert (await gateway.post(CHAT, ask))[0] == 200
        assert (len(engines[0].submits), len(engines[1].submits)) == (0, 1)
        await tell("two", "sleep")
        status, headers, answer = await gateway.post(CHAT, ask)
        error = json.loads(answer)["error"]
        assert (status, error["code"], headers["retry-after"]) == (503, "no_engine", "30")
        assert "sleep" in error["message"]
        assert (await gateway.request("GET", "/readyz"))[0] == 200, "else nobody could reach it to wake them"
        status, listed = await tell("two", "wake")
        assert (status, listed["load"]["sleep"]) == (202, "asleep")
        assert (await gateway.post(CHAT, ask))[0] == 200
        assert (await tell("three", "wake"))[0] == 404
        _, _, log = await gateway.request("GET", "/admin/v1/audit", key=gateway.admin_key)
        told = [entry for entry in json.loads(log)["data"] if entry["object_kind"] == "engines"]
        assert {(entry["object_id"], entry["after"]["asked_to_sleep"]) for entry in told} == {
            ("one", True),
            ("two", True),
            ("two", False),
        }


async def test_an_answer_that_its_grammar_is_too_complex_for_is_billed_up_to_there(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    problem = "the requested grammar is too complex, most of all '/pattern'; simplify it"

    def fails_after_two(submit: Submit) -> Iterator[Any]:
        yield 65, "a"
        yield 66, "b"
        yield Failed(submit.request_id, 0, FailureCode.GRAMMAR_REFUSED, problem)

    engine = FakeEngineClient(card, fails_after_two)
    async with start_gateway([engine]) as gateway:
        for stream in (False, True):
            body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "stream": stream}
            status, _, answer = await gateway.post(CHAT, body)
            error = json.loads(answer.strip().split(b"data: ")[-1])["error"]
            assert (error["code"], error["message"]) == ("unsupported_response_format", problem)
            assert status == (200 if stream else 400)
        for row in await gateway.rows.wait_for(2):
            assert (row.outcome, row.error_code) == ("failed", "unsupported_response_format")
            assert row.prompt_tokens > 0 and row.output_tokens == 2

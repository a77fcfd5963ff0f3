"""Requests that may have crashed their engine are sent to no other engine, and other requests are not affected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import openai
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient, report_counts
from moiety_wire.engine_load import ClassLoad
from moiety_wire.messages import Failed, FailureCode, Submit

from .conftest import NewCard, StartGateway

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 60}
WHOLE = " ".join(str(1 + i) for i in range(60))


def engines_of(new_card: NewCard, number: int, **settings: Any) -> list[FakeEngineClient]:
    cards = [msgspec.structs.replace(new_card(f"engine-{i}"), follows_grammars=True) for i in range(number)]
    return [FakeEngineClient(card, **settings) for card in cards]


def busy(engines: Sequence[FakeEngineClient]) -> Any:
    """Return the engines that have a request now."""
    return [engine for engine in engines if engine.state.num_inflight]


async def text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


GRAMMAR: dict[str, Any] = {"response_format": {"type": "json_object"}}


def dies_before_the_first_token(engines: Sequence[FakeEngineClient]) -> None:
    """A script: each engine dies in the first step of a request whose prompt says so; others are answered."""

    def script(submit: Submit) -> Iterator[Any]:
        for position, piece in enumerate(report_counts(submit)):
            if position == 0 and submit.stopping.max_tokens == 7:
                next(engine for engine in engines if submit in engine.submits and engine.state.healthy).die()
            yield piece

    for engine in engines:
        engine.script = script


@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
async def test_a_grammar_request_whose_engine_died_in_its_first_step_is_not_retried(
    start_gateway: StartGateway, new_card: NewCard, api: str
) -> None:
    engines = engines_of(new_card, 3)
    dies_before_the_first_token(engines)
    path, more = {
        "chat": ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 7, **GRAMMAR}),
        "completions": ("/v1/completions", {"prompt": "hello", "max_tokens": 7, **GRAMMAR}),
        "responses": (
            "/v1/responses",
            {"input": "hello", "max_output_tokens": 7, "text": {"format": {"type": "json_object"}}},
        ),
    }[api]
    async with start_gateway(engines) as gateway:
        status, _, body = await gateway.post(path, {"model": "tiny", **more})
        assert (status, b"may have died of it" in body) == (400, True), body
        assert sum(len(engine.submits) for engine in engines) == 1
        (row,) = await gateway.rows.wait_for(1)
        assert (row.error_code, row.output_tokens) == ("engine_crash_suspected", 0)


async def test_a_request_without_a_grammar_moves_once_after_an_engine_died_in_its_first_step(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = engines_of(new_card, 3)
    dies_before_the_first_token(engines)
    async with start_gateway(engines) as gateway:
        with pytest.raises(openai.BadRequestError) as refused:
            await gateway.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=7)
        assert refused.value.code == "engine_crash_suspected"
        assert sum(len(engine.submits) for engine in engines) == 2
        answer = await gateway.client.chat.completions.create(**ASK)  # by the engine that is left
        assert answer.choices[0].message.content == WHOLE


@pytest.mark.parametrize("grammar", [{}, GRAMMAR])
async def test_requests_with_tokens_continue_after_another_request_crashed_their_engine(
    start_gateway: StartGateway, new_card: NewCard, grammar: Any
) -> None:
    engines = engines_of(new_card, 2, token_s=0.001)
    dies_before_the_first_token(engines)
    async with start_gateway(engines) as gateway:
        stream = await gateway.client.chat.completions.create(**ASK, **grammar, stream=True)
        first = await anext(aiter(stream))
        while not first.choices[0].delta.content:
            first = await anext(aiter(stream))
        (has_it,) = busy(engines)
        (other,) = [engine for engine in engines if engine is not has_it]
        other.class_loads = [ClassLoad("standard", 9, 9, 9.0, 0, {}, 0, {}, 0, 0, 0)]  # so the next one goes there too
        with pytest.raises(openai.BadRequestError):
            await gateway.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=7, **GRAMMAR)
        assert not has_it.state.healthy and other.state.healthy
        rest = await text_of(stream)
        assert first.choices[0].delta.content + rest == WHOLE


@pytest.mark.parametrize("in_first_step", [False, True, None])
@pytest.mark.parametrize("constrained", [False, True])
async def test_the_engines_failure_report_decides_which_request_is_suspected(
    start_gateway: StartGateway, new_card: NewCard, in_first_step: bool | None, constrained: bool
) -> None:
    """False: it waited there. None: the engine shuts down, and nothing died."""
    engines = engines_of(new_card, 2)
    left = [1]

    def script(submit: Submit) -> Any:
        if left:
            left.pop()
            message = "the engine's core process died; send the request again"
            return Failed(submit.request_id, 1, FailureCode.ENGINE_FAILED, message, in_first_step=in_first_step)
        return report_counts(submit)

    for engine in engines:
        engine.script = script
    async with start_gateway(engines) as gateway:
        ask: dict[str, Any] = {**ASK, **(GRAMMAR if constrained else {})}
        if constrained and in_first_step:
            with pytest.raises(openai.BadRequestError) as refused:
                await gateway.client.chat.completions.create(**ask)
            assert refused.value.code == "engine_crash_suspected"
            assert sum(len(engine.submits) for engine in engines) == 1
        else:
            answer = await gateway.client.chat.completions.create(**ask)
            assert answer.choices[0].message.content == WHOLE
            assert sum(len(engine.submits) for engine in engines) == 2

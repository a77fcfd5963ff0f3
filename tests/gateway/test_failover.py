"""Engines that are lost during an answer: it continues once at another engine, and never at all of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import zmq
from prometheus_client import generate_latest

from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.scripted.text_model import scripted_text_model
from moiety_engine.server.engine_server import EngineServer
from moiety_engine.server.settings import ServerSettings
from moiety_platform.clock import SystemClock
from moiety_platform.engine_client.fake import FakeEngineClient, FakeVerdict, report_counts
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_platform.errors import Unavailable
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit
from moiety_wire.trace_events import Reason

from .conftest import NewCard, SpanList, StartGateway, Until

HELLO = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 60}
WHOLE = " ".join(str(1 + i) for i in range(60))


def engines_of(new_card: NewCard, number: int, **settings: Any) -> list[FakeEngineClient]:
    return [FakeEngineClient(new_card(f"engine-{i}"), **settings) for i in range(number)]


def busy(engines: Sequence[FakeEngineClient]) -> Any:
    """Return the engines that have a request now."""
    return [engine for engine in engines if engine.state.num_inflight]


def submits_of(engines: Sequence[FakeEngineClient]) -> Any:
    """Return all submits, ordered by the number of tokens that they resume after."""
    return sorted((one for engine in engines for one in engine.submits), key=lambda one: len(one.resumed_ids or ()))


def dies_at(engines: Sequence[FakeEngineClient], *positions: Any) -> None:
    """Give engines a script by which the engine that reaches one of these positions dies, once for each position."""
    left = set(positions)

    def script(submit: Submit) -> Iterator[Any]:
        for position, piece in enumerate(report_counts(submit)):
            if position in left:
                left.discard(position)
                busy(engines)[0].die()
            yield piece

    for engine in engines:
        engine.script = script


def dying_engines(new_card: NewCard, position: int) -> list[FakeEngineClient]:
    """Return two engines, of which the first that reaches the position dies."""
    engines = engines_of(new_card, 2)
    dies_at(engines, position)
    return engines


async def text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@pytest.mark.parametrize("credit_window_tokens", [1, 128])  # 1: it is paused for want of credit again and again
async def test_a_stream_continues_at_another_engine_without_lost_or_repeated_tokens(
    start_gateway: StartGateway, new_card: NewCard, credit_window_tokens: int
) -> None:
    engines = engines_of(new_card, 3, verdict=lambda submit: FakeVerdict("standard", num_cached_tokens=7))
    dies_at(engines, 10, 30)
    async with start_gateway(engines, credit_window_tokens=credit_window_tokens) as gateway:
        stream = await gateway.client.chat.completions.create(**ASK, stream=True)
        assert await text_of(stream) == WHOLE
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("length", 200, None)
        assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (gateway.prompt_tokens("hello"), 7, 60)
        first, second, third = submits_of(engines)
        assert first.resumed_ids is None
        assert (len(second.resumed_ids), len(third.resumed_ids)) == (10, 30)
        assert {len(engine.submits) for engine in engines} == {1}  # none had it twice
        assert b'moiety_failovers_total{cause="engine_failed",model="tiny"} 2.0' in generate_latest(
            gateway.metrics.registry
        )


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_whole_answer_with_several_choices_and_logprobs_is_that_of_an_undisturbed_run(
    start_gateway: StartGateway, new_card: NewCard, num_choices: int
) -> None:
    engines = engines_of(new_card, 2, token_s=0.001)
    ask: dict[str, Any] = {**ASK, "n": num_choices, "logprobs": True}
    async with start_gateway(engines) as gateway:
        expected = await gateway.client.chat.completions.create(**ask)
        dies_at(engines, 20)
        got = await gateway.client.chat.completions.create(**ask)
        assert [choice.model_dump() for choice in got.choices] == [choice.model_dump() for choice in expected.choices]
        assert got.usage == expected.usage
        undisturbed, row = await gateway.rows.wait_for(2)
        assert (row.output_tokens, row.prompt_tokens) == (undisturbed.output_tokens, undisturbed.prompt_tokens)


class GoneOnceClient(FakeEngineClient):
    """Engine that is found to be gone when a failover submits to it, once for all engines of `gone`."""

    gone: list[str]

    @asynccontextmanager
    async def open(self, submit: Submit, inbox: Any = None) -> AsyncIterator[Any]:
        if submit.resumed_ids is not None and not self.gone:
            self.gone.append(self.address)
            raise Unavailable("the engine is gone")
        async with super().open(submit, inbox) as stream:
            yield stream


async def test_expert_bytes_of_the_first_engine_count_once_if_the_next_one_is_gone(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    def fails_first(submit: Submit) -> Iterator[Any]:
        for position, piece in enumerate(report_counts(submit)):
            if position == 5 and submit.resumed_ids is None:
                yield Failed(submit.request_id, 0, FailureCode.DRAINING, "shut down", expert_read_bytes=1000,
                             expert_moved_bytes=70)  # fmt: skip
            yield piece

    engines = [GoneOnceClient(new_card(f"engine-{i}"), fails_first) for i in range(3)]
    gone: list[str] = []
    for engine in engines:
        engine.gone = gone
    async with start_gateway(engines) as gateway:
        stream = await gateway.client.chat.completions.create(**ASK, stream=True)
        assert await text_of(stream) == WHOLE
        (row,) = await gateway.rows.wait_for(1)
        assert len(gone) == 1 and sorted(len(engine.submits) for engine in engines) == [0, 1, 1]
        assert (row.expert_read_bytes, row.expert_moved_bytes) == (1000, 70)


async def test_a_stop_string_that_begins_at_one_engine_ends_at_another(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = dying_engines(new_card, 10)
    async with start_gateway(engines) as gateway:
        stream = await gateway.client.chat.completions.create(**ASK, stop="10 11", stream=True)
        assert await text_of(stream) == "1 2 3 4 5 6 7 8 9 "
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.output_tokens) == ("stop", 11)


async def test_a_stream_of_the_messages_api_continues_at_another_engine(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = dying_engines(new_card, 10)
    async with start_gateway(engines) as gateway:
        status, _, body = await gateway.post("/v1/messages", ASK)
        assert (status, json.loads(body)["content"]) == (200, [{"type": "text", "text": WHOLE}])
        first, second = submits_of(engines)
        assert first.billing_context == second.billing_context != b""


async def test_an_input_whose_engine_is_lost_before_its_vector_came_is_embedded_at_another(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    lost: list[Any] = []

    def vector(submit: Submit, width: int) -> Any:
        axis = submit.prompt_ids[0] % width
        if len(submit.prompt_ids) == 2 and not lost:
            lost.extend(engine for engine in busy(engines) if submit in engine.submits)
            lost[0].die()
        return [float(i == axis) for i in range(width)]

    cards = [new_card(f"engine-{i}", embedding_width=8) for i in range(2)]
    engines = [FakeEngineClient(card, vector=vector, token_s=0.01) for card in cards]
    async with start_gateway(engines) as gateway:
        given = [[3], [5, 1], [7, 1, 1]]
        answer = await gateway.client.embeddings.create(model="tiny", input=given, encoding_format="float")
        axes = [entry.embedding.index(1.0) for entry in answer.data]
        assert (axes, answer.usage.prompt_tokens) == ([3, 5, 7], 6)
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.prompt_tokens, row.output_tokens, row.num_choices) == ("stop", 6, 0, 3)
        again = [one for engine in engines for one in engine.submits if one.resumed_ids is not None]
        assert [(one.resumed_ids, one.embed, one.stopping.max_tokens) for one in again] == [([], True, 0)] * len(again)
        assert [5, 1] in [one.prompt_ids for one in again]
        assert len({one.billing_context for engine in engines for one in engine.submits} - {b""}) == 1


async def test_a_request_that_kills_every_engine_takes_three_and_no_more(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = engines_of(new_card, 5)

    def poison(submit: Submit) -> Iterator[Any]:
        for i, piece in enumerate(report_counts(submit)):
            if i == len(submit.resumed_ids or ()) + 3:
                for engine in busy(engines):
                    engine.die()
            yield piece

    for engine in engines:
        engine.script = poison
    async with start_gateway(engines) as gateway:
        stream = await gateway.client.chat.completions.create(**ASK, n=2, stream=True)
        with pytest.raises(openai.APIError) as caught:
            await text_of(stream)
        assert caught.value.code == "engine_failed"
        assert sum(engine.state.healthy for engine in engines) >= 2
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("failed", 200, "engine_failed")


async def test_an_engine_that_refuses_for_draining_is_no_answer_while_another_is_there(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    def drains(submit: Submit) -> Any:
        return Failed(submit.request_id, 0, FailureCode.DRAINING, "the engine is shutting down")

    engines = [FakeEngineClient(new_card("draining"), drains), FakeEngineClient(new_card("other"))]
    async with start_gateway(engines) as gateway:
        for _ in range(3):
            answer = await gateway.client.chat.completions.create(**ASK)
            assert answer.choices[0].message.content == WHOLE
        assert [submit.resumed_ids for submit in engines[1].submits] == [None] * 3  # new to it as to the first


async def test_an_engine_that_comes_back_in_time_takes_up_what_it_had(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    engine = FakeEngineClient(card)
    dies_at([engine], 10)
    async with start_gateway([engine], failover_wait_s=5) as gateway:
        stream = await gateway.client.chat.completions.create(**ASK, stream=True)
        await until(lambda: not engine.state.healthy)
        await engine.start()
        assert await text_of(stream) == WHOLE
        assert [len(submit.resumed_ids or ()) > 0 for submit in engine.submits] == [False, True]


async def test_a_second_engine_that_refuses_leaves_the_first_one_s_failure_as_the_error(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = engines_of(new_card, 2)

    def once_or_never(submit: Submit) -> Any:
        if submit.resumed_ids is not None:
            return Failed(submit.request_id, 0, FailureCode.OVERLOADED, "full", reason=Reason.QUEUE_FULL)
        return dying(submit)

    dies_at(engines, 5)
    dying = engines[0].script
    for engine in engines:
        engine.script = once_or_never
    async with start_gateway(engines) as gateway:
        stream = await gateway.client.chat.completions.create(**ASK, stream=True)
        with pytest.raises(openai.APIError) as caught:
            await text_of(stream)
        assert caught.value.code == "engine_failed"


async def test_a_downgraded_request_continues_in_its_served_class(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = engines_of(new_card, 2, verdict=lambda submit: FakeVerdict("flex", Reason.PREDICTED_LATE))
    dies_at(engines, 5)
    async with start_gateway(engines) as gateway:
        change = json.dumps({"on_overload": "downgrade", "downgrade_to": "flex"}).encode()
        assert (await gateway.request("PATCH", "/admin/v1/classes/standard", change, gateway.admin_key))[0] == 200
        stream = await gateway.client.chat.completions.create(**ASK, stream=True)
        assert await text_of(stream) == WHOLE
        first, second = submits_of(engines)
        assert (first.service.name, first.fallback.name) == ("standard", "flex")
        assert (second.service.name, second.fallback) == ("flex", None)
        (row,) = await gateway.rows.wait_for(1)
        assert row.service_class == "flex"


async def test_the_span_records_the_failover(start_gateway: StartGateway, new_card: NewCard, spans: SpanList) -> None:
    engines = dying_engines(new_card, 5)
    async with start_gateway(engines, spans) as gateway:
        await text_of(await gateway.client.chat.completions.create(**ASK, stream=True))
        await gateway.rows.wait_for(1)
    _, resumed = submits_of(engines)
    (span,) = spans.named("chat tiny")
    assert span.attributes["moiety.failovers"] == 1
    (event,) = [event for event in span.events if event.name == "moiety.failed_over"]
    assert event.attributes["moiety.reason"] == "engine_failed"
    assert {event.attributes["moiety.engine.from"], event.attributes["moiety.engine.to"]} == {
        engine.address for engine in engines
    }
    num_again = len(resumed.prompt_ids) + len(resumed.resumed_ids)
    assert span.attributes["moiety.recomputed_tokens"] == num_again
    lost, *phases = [one for one in spans.spans if "moiety.engine" in one.attributes]
    assert (lost.name, lost.error, lost.links) == ("engine.attempt", "engine_failed", ())
    assert [one.name for one in phases] == ["engine.queue", "engine.prefill", "engine.decode"]
    assert [one.links for one in phases] == [((lost.trace_id, lost.span_id),), (), ()]
    assert [one.attributes["moiety.engine"] for one in (lost, phases[0])] == [
        event.attributes[f"moiety.engine.{end}"] for end in ("from", "to")
    ]
    assert phases[-1].attributes["gen_ai.usage.output_tokens"] == span.attributes["gen_ai.usage.output_tokens"] == 60
    assert {one.attributes.get("moiety.resumed_tokens") for one in phases} == {5}
    assert {one.parent_id for one in (lost, *phases)} == {span.span_id}


@pytest.fixture
async def fronts() -> AsyncIterator[tuple[Any, ...]]:
    """Two engine servers with scripted engines, and the context of their sockets."""
    context = zmq.Context()
    running = []
    for number in range(2):
        settings = ServerSettings(model="tiny", listen="tcp://127.0.0.1:0", heartbeat_interval_s=0.05)
        core = ScriptedCore(Script(step_delay_s=0.002))
        running.append(EngineServer(settings, f"engine-{number}", scripted_text_model(), core, context))
        await running[-1].start()
    yield running, context
    for front in running:
        await front.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("end", ["drained", "core lost", "closed"])
async def test_an_engine_that_ends_hands_over_what_it_did_not_finish(
    start_gateway: StartGateway, fronts: Any, until: Until, end: str
) -> None:
    running, context = fronts
    clients = [ZmqEngineClient(front.address, context, SystemClock()) for front in running]
    prompt = "naïve 日本語 🙂 "
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 400,
        "stream": True,
        "extra_body": {"ignore_eos": True},
    }
    async with start_gateway(clients) as gateway:
        await until(lambda: all(client.state.healthy for client in clients))
        stream = await gateway.client.completions.create(**body, logprobs=1)
        text = ""
        tokens: list[Any] = []
        async for chunk in stream:
            (choice,) = chunk.choices
            text += choice.text
            tokens += choice.logprobs.tokens if choice.logprobs else []
            if len(tokens) == 50:
                (busy_front,) = [front for front in running if front.num_open]
                match end:
                    case "drained":
                        busy_front.begin_drain(0.05)
                    case "core lost":
                        busy_front.on_death("killed")
                    case "closed":
                        await busy_front.close()
        spelled = [chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}" for byte in prompt.encode()]
        assert tokens == (spelled * 400)[:400]
        assert text == (prompt.encode() * 400)[:400].decode(errors="replace")
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.output_tokens, row.prompt_tokens) == ("length", 400, len(prompt.encode()))
        rendered = generate_latest(gateway.metrics.registry).decode()
        assert f'cause="{"engine_draining" if end == "drained" else "engine_failed"}",model="tiny"}} 1.0' in rendered


async def test_a_request_goes_to_an_engine_whose_context_holds_it_or_is_refused(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    short, long = (FakeEngineClient(new_card(f"of-{size}", max_context_tokens=size)) for size in (128, 512))
    for engines in ([short, long], [long, short]):
        async with start_gateway(engines, max_choices=4) as gateway:
            create = gateway.client.chat.completions.create
            before = len(long.submits)
            for _ in range(4):  # more than the short one could have been spared by chance
                await create(model="tiny", messages=[{"role": "user", "content": "a" * 200}], max_tokens=2, n=2)
            assert len(long.submits) == before + 8
            with pytest.raises(openai.BadRequestError, match="512 tokens") as refused:
                await create(model="tiny", messages=[{"role": "user", "content": "a" * 600}], max_tokens=2)
            assert refused.value.code == "context_length_exceeded"
            await create(model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=2, n=2)
    assert all(len(one.prompt_ids) + one.stopping.max_tokens <= 128 for one in short.submits)

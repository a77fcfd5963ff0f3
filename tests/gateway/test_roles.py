"""Disaggregated prefill and decode: the requests of each engine, and the outcome if either engine is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import zmq
from prometheus_client import generate_latest

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig, TransferConfig
from moiety_engine.server.core_link import ProcessCore
from moiety_engine.server.engine_server import EngineServer
from moiety_engine.server.settings import ServerSettings
from moiety_platform.clock import SystemClock
from moiety_platform.engine_client.base import EngineState
from moiety_platform.engine_client.fake import FakeEngineClient, report_counts
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_platform.errors import Unavailable
from moiety_platform.routing.choose import kv_address_of, partner_among
from moiety_text.folder import read_text_model
from moiety_wire.classes import STANDARD
from moiety_wire.engine_load import Load, StepCosts
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit
from moiety_wire.roles import EngineRole, KvRanks, transfer_token
from moiety_wire.trace_events import Reason

from .conftest import NewCard, RunningGateway, SpanList, StartGateway

START_S = 120.0
HELLO = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 60}
WHOLE = " ".join(str(1 + i) for i in range(60))


@pytest.fixture
def engine_of(new_card: NewCard) -> Callable[..., FakeEngineClient]:
    def make(role: EngineRole, number: int = 0, **settings: Any) -> FakeEngineClient:
        card = msgspec.structs.replace(
            new_card(f"{role}-{number}", embedding_width=8),
            role=role,
            hands_over=role is EngineRole.PREFILL,
            kv_address="" if role is EngineRole.PREFILL else f"tcp://*:{7000 + number}",
            kv_host="host",
            kv_secret=f"secret {number}",
            kv_ranks=KvRanks(tp=2, pp=number),
        )
        return FakeEngineClient(card, **settings)

    return make


async def text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def answer_of(gateway: RunningGateway, **changes: Any) -> str:
    return await text_of(await gateway.client.chat.completions.create(**{**ASK, **changes}, stream=True))


async def test_the_prompt_goes_to_one_engine_and_the_answer_comes_from_another(
    start_gateway: StartGateway, engine_of: Callable[..., FakeEngineClient], spans: SpanList
) -> None:
    prefill, decode = engine_of(EngineRole.PREFILL), engine_of(EngineRole.DECODE, 5)
    async with start_gateway([prefill, decode], spans) as gateway:
        assert await answer_of(gateway) == WHOLE
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.output_tokens, row.prompt_tokens) == ("length", 60, gateway.prompt_tokens("hello"))
    (first,), (second,) = prefill.submits, decode.submits
    assert (first.hand_over.address, first.hand_over.host) == ("tcp://127.0.0.1:7005", "host")
    assert first.hand_over.token == transfer_token("secret 5", first.hand_over.transfer_id)
    assert first.hand_over.ranks == KvRanks(tp=2, pp=5)
    assert (second.transfer_id, second.resumed_ids) == (first.hand_over.transfer_id, [1])
    assert second.hand_over is None
    assert first.billing_context == second.billing_context != b""
    assert set(prefill.settled_ids) == set(decode.settled_ids) == {first.request_id}
    (span,) = spans.named("chat tiny")
    assert "moiety.failovers" not in span.attributes
    names = [one.name for one in spans.spans if "moiety.engine" in one.attributes]
    assert names == ["engine.queue", "engine.prefill", "engine.queue", "engine.prefill", "engine.decode"]


async def test_answers_are_spread_over_the_engines_that_write_them(
    start_gateway: StartGateway, engine_of: Callable[..., FakeEngineClient]
) -> None:
    prefill = engine_of(EngineRole.PREFILL)
    decodes = [engine_of(EngineRole.DECODE, number) for number in range(3)]
    async with start_gateway([prefill, *decodes]) as gateway:
        answer = await gateway.client.chat.completions.create(**ASK, n=9)
        assert [choice.message.content for choice in answer.choices] == [WHOLE] * 9
    assert [len(engine.submits) for engine in decodes] == [3, 3, 3]


async def test_a_stop_string_over_the_seam_ends_the_answer(
    start_gateway: StartGateway, engine_of: Callable[..., FakeEngineClient]
) -> None:
    engines = [engine_of(EngineRole.PREFILL), engine_of(EngineRole.DECODE)]
    async with start_gateway(engines) as gateway:
        assert await answer_of(gateway, stop=["1 2"]) == ""
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.output_tokens) == ("stop", 2)


@pytest.mark.parametrize("victim", ["prefill", "decode", "decode before the hand-over"])
async def test_requests_of_a_lost_engine_are_recomputed_by_others(
    start_gateway: StartGateway, engine_of: Callable[..., FakeEngineClient], victim: str
) -> None:
    prefills = [engine_of(EngineRole.PREFILL, number) for number in range(2)]
    decodes = [engine_of(EngineRole.DECODE, number) for number in range(2)]
    killed: list[Any] = []

    def script(submit: Submit) -> Iterator[Any]:
        for position, piece in enumerate(report_counts(submit)):
            if not killed and position == (10 if victim == "decode" else 0):
                (busy,) = [engine for engine in [*prefills, *decodes] if engine.state.num_inflight]
                address = submit.hand_over.address if submit.hand_over else ""
                partner = next((one for one in decodes if one.card.kv_address.rpartition(":")[2] in address), None)
                killed.append(partner if victim == "decode before the hand-over" else busy)
                killed[0].die()
            yield piece

    for engine in [*prefills, *decodes]:
        engine.script = script
    async with start_gateway([*prefills, *decodes]) as gateway:
        assert await answer_of(gateway) == WHOLE
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.output_tokens) == ("length", 60)
        assert b"moiety_failovers_total{" in generate_latest(gateway.metrics.registry)
    assert killed[0].card.role is (EngineRole.PREFILL if victim == "prefill" else EngineRole.DECODE)


async def test_an_engine_that_refuses_what_is_handed_over_does_not_lose_it(
    start_gateway: StartGateway, engine_of: Callable[..., FakeEngineClient]
) -> None:
    full = Failed("", 0, FailureCode.OVERLOADED, "full", reason=Reason.QUEUE_FULL)
    refusing = engine_of(EngineRole.DECODE, 0)
    refusing.script = lambda submit: msgspec.structs.replace(full, request_id=submit.request_id)
    engines = [engine_of(EngineRole.PREFILL), refusing, engine_of(EngineRole.DECODE, 1)]
    async with start_gateway(engines) as gateway:
        assert await answer_of(gateway) == WHOLE
        assert len(refusing.submits) == len(engines[2].submits) == 1


async def test_an_engine_of_both_roles_replaces_a_missing_decode_engine_or_the_request_fails(
    start_gateway: StartGateway, engine_of: Callable[..., FakeEngineClient]
) -> None:
    prefill, both = engine_of(EngineRole.PREFILL), engine_of(EngineRole.BOTH)
    async with start_gateway([prefill, both]) as gateway:
        assert await answer_of(gateway) == WHOLE
        both.die()
        with pytest.raises(openai.APIStatusError) as caught:
            await answer_of(gateway)
        assert (caught.value.status_code, caught.value.code) == (503, "no_decode_engine")
        assert "--role decode" in caught.value.message
        embedded = await gateway.client.embeddings.create(model="tiny", input="hello", encoding_format="float")
        assert len(embedded.data[0].embedding) == 8


async def test_decode_engines_serve_whole_requests_without_a_prefill_engine(
    start_gateway: StartGateway, engine_of: Callable[..., FakeEngineClient]
) -> None:
    prefill, decode = engine_of(EngineRole.PREFILL), engine_of(EngineRole.DECODE)
    async with start_gateway([prefill, decode]) as gateway:
        prefill.die()
        assert await answer_of(gateway) == WHOLE
        (submit,) = decode.submits
        assert (submit.hand_over, submit.transfer_id, submit.resumed_ids) == (None, "", None)


async def test_one_token_needs_no_other_engine(
    start_gateway: StartGateway, engine_of: Callable[..., FakeEngineClient]
) -> None:
    prefill, decode = engine_of(EngineRole.PREFILL), engine_of(EngineRole.DECODE)
    async with start_gateway([prefill, decode]) as gateway:
        assert await answer_of(gateway, max_tokens=1) == "1"
        assert (len(prefill.submits), decode.submits) == (1, [])


def state_of(
    card: ModelCard,
    role: str,
    *,
    address: str = "tcp://10.0.0.1:5757",
    running: int = 0,
    step_s: float = 0.01,
    kv_address: str = "tcp://*:7000",
) -> EngineState:
    costs = StepCosts(step_s, 1e-4, (), 0, 0, 0)
    load = Load(running, 0, 0, 100, 0, 0, 16, 0, 0, 0, 0, 0, engine_id="e", seq=0, step_costs=costs)
    hands_over = role is EngineRole.PREFILL
    card = msgspec.structs.replace(card, role=role, hands_over=hands_over, kv_address=kv_address)
    return EngineState(address, True, "", card, load, 0, load_age_s=0.0)


def test_decode_engine_is_chosen_by_role_then_pace_then_load(
    any_card: ModelCard,
) -> None:
    both = state_of(any_card, EngineRole.BOTH, address="both")
    slow = state_of(any_card, EngineRole.DECODE, address="slow", step_s=1.0)
    busy = state_of(any_card, EngineRole.DECODE, address="busy", running=9)
    idle = state_of(any_card, EngineRole.DECODE, address="idle")
    deaf = state_of(any_card, EngineRole.DECODE, address="deaf", kv_address="")
    assert partner_among([both, slow, busy, idle, deaf], STANDARD, {}) is idle
    assert partner_among([both, slow, busy, idle], STANDARD, {"idle": 12}) is busy
    assert partner_among([both, slow], STANDARD, {}) is slow
    assert partner_among([both, deaf], STANDARD, {}) is both
    with pytest.raises(Unavailable, match="--role decode"):
        partner_among([deaf, state_of(any_card, EngineRole.PREFILL)], STANDARD, {})


@pytest.mark.parametrize(
    ("address", "kv_address", "expected"),
    [
        ("tcp://10.0.0.1:5757", "tcp://*:7000", "tcp://10.0.0.1:7000"),
        ("tcp://[fd00::1]:5757", "tcp://*:7000", "tcp://[fd00::1]:7000"),
        ("ipc:///run/engine", "tcp://*:7000", "tcp://127.0.0.1:7000"),
        ("tcp://10.0.0.1:5757", "tcp://10.9.9.9:7000", "tcp://10.9.9.9:7000"),
    ],
)
def test_kv_goes_to_the_host_at_which_the_engine_was_reached(
    any_card: ModelCard, address: str, kv_address: str, expected: str
) -> None:
    assert kv_address_of(state_of(any_card, EngineRole.DECODE, address=address, kv_address=kv_address)) == expected


@asynccontextmanager
async def fronts_of(tmp_path: Path, roles: Any) -> AsyncIterator[tuple[Any, ...]]:
    """Real engines of these roles on the bundled model, each with a core process."""
    folder = resolve_checkpoint("")
    key = tmp_path / "key"
    key.write_bytes(zmq.curve_keypair()[1])
    context, running = zmq.Context(), []
    try:
        for number, role in enumerate(roles):
            listen = "tcp://127.0.0.1:0" if role is EngineRole.DECODE else ""
            transfer = TransferConfig(role=role, listen=listen, key_file=str(key))
            config = EngineConfig(
                model=str(folder),
                name="tiny",
                dtype="float32",
                num_threads=1,
                kv_memory_bytes=1 << 25,
                transfer=transfer,
            )
            settings = ServerSettings(model="tiny", listen="tcp://127.0.0.1:0", role=role)
            core = ProcessCore(context, "moiety_engine.core", config, listen=settings.listen)
            front = EngineServer(settings, f"{role}-{number}", read_text_model(folder), core, context)
            running.append(front)
            await front.start()
        for front in running:
            assert await asyncio.wait_for(front.wait_ready(), START_S)
        yield running, context
    finally:
        for front in running:
            await front.close()
        context.destroy(linger=0)


async def test_two_real_engines_say_what_one_says(start_gateway: StartGateway, tmp_path: Path, spans: SpanList) -> None:
    long = "Add 17 to 25, then tell the capital of France. " * 12
    asked = [
        {"model": "tiny", "prompt": prompt, "max_tokens": 40, **sampling}
        for prompt in ("What is 17 + 25?", long)
        for sampling in ({"temperature": 0, "extra_body": {"ignore_eos": True}}, {"temperature": 1.0, "seed": 5})
    ]
    async with fronts_of(tmp_path, (EngineRole.PREFILL, EngineRole.DECODE)) as ((prefill, decode), context):
        clients = [ZmqEngineClient(front.address, context, SystemClock()) for front in (prefill, decode)]
        async with start_gateway(clients, spans) as gateway:
            client = gateway.client.with_options(timeout=START_S)
            async with asyncio.timeout(START_S):
                while not all(one.state.healthy for one in clients):  # noqa: ASYNC110 - what is watched has no event
                    await asyncio.sleep(0.01)
            pair = [await client.completions.create(**one) for one in asked]
            await prefill.close()
            await clients[0].close()
            alone = [await client.completions.create(**one) for one in asked]
        await gateway.rows.wait_for(2 * len(asked))
    assert [one.choices[0].text for one in pair] == [one.choices[0].text for one in alone]
    assert [one.usage.completion_tokens for one in pair] == [one.usage.completion_tokens for one in alone]
    transfers = spans.named("engine.transfer")
    assert len(transfers) == sum(one.usage.completion_tokens > 1 for one in pair) > 0
    assert {one.attributes["moiety.transfer.way"] for one in transfers} == {"memory"}
    by_id = {one.span_id: one.name for one in spans.spans}
    assert {by_id[link.span_id] for one in transfers for link in one.links} == {"engine.prefill"}


async def test_a_submission_that_fails_no_longer_counts_as_coming_to_the_decode_engine(
    start_gateway: StartGateway, engine_of: Callable[..., FakeEngineClient]
) -> None:
    class Vanishing(FakeEngineClient):
        """An engine that is gone when a request reaches it, though its state says otherwise."""

        num_asked = 0

        def open(self, submit: Submit, inbox: Any = None) -> Any:
            self.num_asked += 1
            raise Unavailable("gone since its last heartbeat")

    decode = engine_of(EngineRole.DECODE, 5)
    vanishing = Vanishing(engine_of(EngineRole.PREFILL, 1).state.card)
    async with start_gateway([vanishing, engine_of(EngineRole.PREFILL, 2), decode]) as gateway:
        for number in range(16):  # prompts of different prefixes, some of which prefer that engine
            prompt = [{"role": "user", "content": f"{number} is the number of this prompt"}]
            assert await answer_of(gateway, messages=prompt) == WHOLE
        assert vanishing.num_asked > 0, "else the test tests nothing"
        assert gateway.replicas._coming == {}

"""Routing by outcome: replicas that fail, refuse or break get fewer requests, and others serve what they refuse.

External engines are small servers on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from prometheus_client import generate_latest

from moiety_platform.clock import Clock, ManualClock, SystemClock
from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.engine_client.fake import FakeEngineClient, report_counts
from moiety_platform.external_engines.client import ExternalEngineClient, Heartbeat
from moiety_platform.external_engines.liveness import Liveness
from moiety_platform.routing.circuit_breaker import BreakerState
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit
from moiety_wire.roles import EngineRole

from .closing_server import ClosingServer, read_request
from .conftest import NewCard, RunningGateway, StartGateway, StartOver, Until, write_tokenizer

MODEL = "tiny"
HELLO = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 30}
CHAT = "/v1/chat/completions"
TEXT = "one two three"
BEATS = Heartbeat(interval_s=0.05, timeout_s=30, silence_s=60)  # a server in this process may be slow, not lost
NUM_REQUESTS = 12
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(text: str, finish: str | None = None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"object": "text_completion", "choices": [choice]}).encode() + b"\n\n"


WORDS = [event("one"), event(" two"), event(" three")]
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
END = event("", "stop") + USAGE + b"data: [DONE]\n\n"


def status(code: int, header: str = "") -> bytes:
    return f"HTTP/1.1 {code} No\r\n{header}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()


class Upstream:
    """Answers completions with `answer`, if there is one, and by TEXT if not. `model_list` answers /v1/models."""

    def __init__(self) -> None:
        self.answer: bytes | None = None
        self.num_asked = self.num_probes = 0
        self.listing_fails = False
        self.may_list = asyncio.Event()
        self.may_list.set()
        self.next_word: asyncio.Queue[bytes | None] | None = None  # written as they come; None: cut
        self.server = ClosingServer(self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await read_request(reader)
                if head.startswith("get"):
                    self.num_probes += 1
                    await self.may_list.wait()
                    if self.listing_fails:
                        writer.write(status(500))
                        return
                    body = json.dumps({"data": [{"id": MODEL, "object": "model"}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                    continue
                self.num_asked += 1
                if self.next_word is None:
                    writer.write(STREAM_HEAD + b"".join(WORDS) + END if self.answer is None else self.answer)
                    await writer.drain()
                    return
                writer.write(STREAM_HEAD)
                while (word := await self.next_word.get()) is not None:
                    writer.write(word)
                return
        except (ConnectionError, asyncio.IncompleteReadError):
            return


StartUpstream = Callable[..., Awaitable[Upstream]]
ClientOf = Callable[..., ExternalEngineClient]


@pytest.fixture
async def start_upstream() -> AsyncIterator[StartUpstream]:
    """`await start_upstream(answer)`: a server that listens and gives this answer, or text where there is none."""
    started = []

    async def start(answer: Any = None) -> Upstream:
        started.append(Upstream())
        started[-1].answer = answer
        await started[-1].server.start()
        return started[-1]

    yield start
    for upstream in started:
        upstream.may_list.set()
        await upstream.server.close()


@pytest.fixture
def client_of(tmp_path: Path, card: ModelCard) -> ClientOf:
    """The client of an upstream."""
    write_tokenizer(tmp_path, card)

    def make(upstream: Upstream, heartbeat: Heartbeat = BEATS, clock: Clock | None = None) -> ExternalEngineClient:
        at = f"openai+http://127.0.0.1:{upstream.server.port}/v1?model={MODEL}&kind=generic&tokenizer={tmp_path}&context=512"
        return ExternalEngineClient(ExternalAddress.parse(at), clock or SystemClock(), None, heartbeat)

    return make


async def ask_many(gateway: RunningGateway, number: int = NUM_REQUESTS) -> list[str | int]:
    """What came of so many requests, one after another: the text, or the status. Each replica is some prompts'
    favourite."""
    got: list[str | int] = []
    for i in range(number):
        ask: dict[str, Any] = {**ASK, "messages": [{"role": "user", "content": f"{i:02} hello"}]}
        code, _, body = await gateway.post(CHAT, ask)
        got.append(json.loads(body)["choices"][0]["message"]["content"] if code == 200 else code)
    return got


BAD: dict[str, Any] = {
    "503_retry_after": status(503, "Retry-After: 30\r\n"),
    "429_retry_after": status(429, "Retry-After: 30\r\n"),
    "529_retry_after": status(529, "Retry-After: 30.5\r\n"),
    "503": status(503),
    "401": status(401),
    "402": status(402),
    "403": status(403),
    "404": status(404),
    "500": status(500),
    "cut_before": b"",
    "cut_headers": STREAM_HEAD,
    "cut_within": STREAM_HEAD + b"".join(WORDS[:2]),
    "nonsense": STREAM_HEAD + b"data: {what\n\n",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_replica_is_asked_once_and_then_by_one_trial_after_each_backoff(
    start_upstream: StartUpstream, client_of: ClientOf, start_over: StartOver, bad: Any
) -> None:
    first, second = await start_upstream(), await start_upstream()
    first.answer = BAD[bad]
    engines, clock = [client_of(first), client_of(second)], ManualClock()
    async with start_over(*engines, breaker_clock=clock) as gateway:
        moved = TEXT if bad != "cut_within" else "one two" + TEXT  # this server answers anew whatever came
        assert sorted(await ask_many(gateway)) == sorted([moved] + [TEXT] * (NUM_REQUESTS - 1))
        assert (first.num_asked, second.num_asked) == (1, NUM_REQUESTS)
        rows = await gateway.rows.wait_for(NUM_REQUESTS)
        assert {row.prompt_tokens for row in rows} == {gateway.prompt_tokens("00 hello")}  # each is billed once
        for number in (2, 3):
            clock.advance(40)
            assert set(await ask_many(gateway)) == {TEXT, moved}
            assert first.num_asked == number
        first.answer = None
        clock.advance(61)
        assert await ask_many(gateway) == [TEXT] * NUM_REQUESTS
        assert first.num_asked > 4
        assert gateway.replicas.breakers.state(engines[0].address) is BreakerState.CLOSED


async def test_a_replica_that_is_gone_is_asked_once(
    start_upstream: StartUpstream, client_of: ClientOf, start_over: StartOver
) -> None:
    """Its probe has not noticed yet."""
    first, second = await start_upstream(), await start_upstream()
    engines = [client_of(first, Heartbeat(interval_s=3600, timeout_s=30, silence_s=7200)), client_of(second)]
    async with start_over(*engines) as gateway:
        await first.server.close()
        assert await ask_many(gateway) == [TEXT] * NUM_REQUESTS
        assert second.num_asked == NUM_REQUESTS
        await first.server.start()


async def test_engines_of_ours_that_fail_are_asked_less_as_well(start_gateway: StartGateway, new_card: NewCard) -> None:
    engines = [FakeEngineClient(new_card(f"engine-{i}")) for i in range(2)]

    def fail_in_the_middle(submit: Submit) -> Iterator[Any]:
        yield from list(report_counts(submit))[:3]
        yield Failed(submit.request_id, 0, FailureCode.ENGINE_FAILED, "it broke")

    engines[0].script = fail_in_the_middle
    whole = " ".join(str(1 + i) for i in range(30))
    async with start_gateway(engines, breaker_clock=ManualClock()) as gateway:
        assert await ask_many(gateway) == [whole] * NUM_REQUESTS
        assert len(engines[0].submits) == 1
        metrics = generate_latest(gateway.metrics.registry).decode()
        assert f'moiety_engine_circuit_state{{engine="{engines[0].address}"}} 2.0' in metrics
        _, _, answer = await gateway.request("GET", "/admin/v1/engines", b"", gateway.admin_key)
        assert [one["circuit"] for one in json.loads(answer)["data"]] == ["open", "closed"]
        assert f'moiety_engine_circuit_openings_total{{engine="{engines[0].address}"}} 1.0' in metrics
        assert f'moiety_engine_outcomes_total{{engine="{engines[0].address}",outcome="broken"}} 1.0' in metrics
        assert f'engine="{engines[1].address}",outcome="succeeded"}} {NUM_REQUESTS}.0' in metrics


@pytest.mark.parametrize("bad_role", [EngineRole.PREFILL, EngineRole.DECODE])
async def test_failing_engines_with_roles_get_fewer_requests(
    start_gateway: StartGateway, new_card: NewCard, bad_role: Any
) -> None:
    def engine_of(role: EngineRole, number: int) -> FakeEngineClient:
        at = "" if role is EngineRole.PREFILL else f"tcp://*:{7000 + number}"
        roles: dict[str, Any] = {"role": role, "hands_over": not at, "kv_address": at, "kv_host": "host"}
        return FakeEngineClient(msgspec.structs.replace(new_card(f"{role}-{number}"), **roles))

    engines = {role: [engine_of(role, i) for i in range(2)] for role in (EngineRole.PREFILL, EngineRole.DECODE)}

    def fail(submit: Submit) -> Iterator[Any]:
        yield from list(report_counts(submit))[: len(submit.resumed_ids or ())]  # which were said before
        yield Failed(submit.request_id, 0, FailureCode.ENGINE_FAILED, "it broke")

    bad, good = engines[bad_role]
    bad.script = fail
    whole = " ".join(str(1 + i) for i in range(30))
    async with start_gateway(
        [*engines[EngineRole.PREFILL], *engines[EngineRole.DECODE]], breaker_clock=ManualClock()
    ) as gateway:
        assert await ask_many(gateway) == [whole] * NUM_REQUESTS
        assert len(bad.submits) == 1
        assert gateway.replicas.breakers.state(bad.address) is BreakerState.OPEN
        assert len(good.submits) >= NUM_REQUESTS - 1


async def test_replicas_are_still_tried_when_all_of_them_fail(
    start_upstream: StartUpstream, client_of: ClientOf, start_over: StartOver
) -> None:
    upstreams = [await start_upstream(status(500)) for _ in range(2)]
    async with start_over(*map(client_of, upstreams), breaker_clock=ManualClock(), failover_wait_s=0) as gateway:
        assert await ask_many(gateway, 2) == [502, 502]
        assert [upstream.num_asked for upstream in upstreams] == [2, 2]
        for upstream in upstreams:
            upstream.answer = None
        assert await ask_many(gateway, 4) == [TEXT] * 4


async def test_retry_after_of_every_replica_gives_503_with_the_shortest_wait(
    start_upstream: StartUpstream, client_of: ClientOf, start_over: StartOver
) -> None:
    upstreams, clock = [await start_upstream(), await start_upstream()], ManualClock()
    upstreams[0].answer, upstreams[1].answer = (status(503, f"Retry-After: {s}\r\n") for s in (40, 20))
    async with start_over(*map(client_of, upstreams), breaker_clock=clock) as gateway:
        assert await ask_many(gateway, 1) == [503]
        clock.advance(5)
        code, headers, body = await gateway.post(CHAT, ASK)
        assert (code, json.loads(body)["error"]["code"]) == (503, "engine_overloaded")
        assert headers["retry-after"] == "15"
        assert [upstream.num_asked for upstream in upstreams] == [1, 1]
        rows = await gateway.rows.wait_for(2)
        assert not any(row.prompt_tokens or row.output_tokens for row in rows)
        upstreams[1].answer = None
        clock.advance(15)
        assert await ask_many(gateway, 3) == [TEXT] * 3
        assert [upstream.num_asked for upstream in upstreams] == [1, 4]


async def test_the_client_gets_the_retryable_refusal_among_several(
    start_upstream: StartUpstream, client_of: ClientOf, start_over: StartOver
) -> None:
    upstreams = [await start_upstream(), await start_upstream()]
    upstreams[0].answer, upstreams[1].answer = status(401), status(503, "Retry-After: 9\r\n")
    async with start_over(*map(client_of, upstreams)) as gateway:
        code, headers, _ = await gateway.post(CHAT, ASK)
        assert (code, headers["retry-after"]) == (503, "9")


async def test_client_errors_open_no_breaker_and_are_sent_to_one_replica_only(
    start_upstream: StartUpstream, client_of: ClientOf, start_over: StartOver
) -> None:
    upstreams = [await start_upstream(status(422)) for _ in range(2)]
    async with start_over(*map(client_of, upstreams)) as gateway:
        assert await ask_many(gateway, 5) == [502] * 5  # engine_refused
        assert sum(upstream.num_asked for upstream in upstreams) == 5
        assert {state for _, state, _ in gateway.replicas.breakers.states()} == {BreakerState.CLOSED}


async def test_one_stream_that_is_cut_does_not_lose_the_engine_for_others(
    start_upstream: StartUpstream, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    upstream = await start_upstream()
    engine = client_of(upstream)
    async with start_over(engine, failover_wait_s=0) as gateway:
        words: asyncio.Queue[bytes | None] = asyncio.Queue()
        upstream.next_word = words
        words.put_nowait(WORDS[0])
        stream = await gateway.client.chat.completions.create(**ASK, stream=True)
        chunks = stream.__aiter__()
        await anext(chunks)
        upstream.next_word = None
        upstream.answer = STREAM_HEAD + WORDS[0]  # and then the connection ends
        losses = []
        engine.on_state_change(lambda: losses.append(engine.state.healthy))
        with pytest.raises(openai.APIError):
            await gateway.client.chat.completions.create(**ASK)
        assert engine.state.healthy
        assert False not in losses
        words.put_nowait(b"".join(WORDS[1:]) + END)
        words.put_nowait(None)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
        assert text.endswith(" two three")
        upstream.answer = None
        assert await ask_many(gateway, 2) == [TEXT] * 2


async def test_a_stream_that_flows_is_not_killed_by_probes_that_are_not_answered(
    start_upstream: StartUpstream, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    upstream, clock = await start_upstream(), ManualClock()
    engine = client_of(upstream, Heartbeat(interval_s=0.01, timeout_s=0.02, silence_s=5), clock)
    async with start_over(engine) as gateway:
        words: asyncio.Queue[bytes | None] = asyncio.Queue()
        upstream.next_word = words
        words.put_nowait(event("x"))
        upstream.may_list.clear()  # no probe is answered from now on
        stream = await gateway.client.chat.completions.create(**{**ASK, "max_tokens": 400}, stream=True)
        texts = (chunk.choices[0].delta.content async for chunk in stream if chunk.choices)
        for _ in range(8):
            while await anext(texts) != "x":
                pass
            clock.advance(4)
            num_before = upstream.num_probes
            await until(lambda: upstream.num_probes >= num_before + 2)  # noqa: B023 - one has timed out since
            assert engine.state.healthy
            words.put_nowait(event("x"))
        words.put_nowait(END)
        words.put_nowait(None)
        assert "".join([text or "" async for text in texts]) == "x"
        clock.advance(5.1)
        await until(lambda: not engine.state.healthy)  # now that nothing comes any more
        assert "did not answer" in engine.state.reason


async def test_a_server_whose_streams_flow_is_there_although_its_list_of_models_fails(
    start_upstream: StartUpstream, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    upstream, clock = await start_upstream(), ManualClock()
    engine = client_of(upstream, Heartbeat(interval_s=0.01, timeout_s=30, silence_s=5), clock)
    async with start_over(engine) as gateway:
        assert await ask_many(gateway, 1) == [TEXT]
        upstream.listing_fails = True
        num_before = upstream.num_probes
        await until(lambda: upstream.num_probes >= num_before + 3)
        assert engine.state.healthy
        assert await ask_many(gateway, 2) == [TEXT] * 2
        clock.advance(5.1)
        await until(lambda: not engine.state.healthy)
        assert "status 500" in engine.state.reason
        upstream.listing_fails = False
        await until(lambda: engine.state.healthy)


def test_any_received_message_counts_as_a_sign_of_life() -> None:
    clock = ManualClock()
    liveness = Liveness(clock, silence_s=5)
    for _ in range(10):
        clock.advance(4)
        assert not liveness.is_lost
        liveness.record_data()
        assert not liveness.is_streaming
    clock.advance(4)
    liveness.record_stream()
    assert liveness.is_streaming
    clock.advance(5.1)
    assert liveness.is_lost
    assert not liveness.is_streaming


def test_a_pause_between_checks_counts_as_one_interval_of_silence() -> None:
    clock = ManualClock()
    liveness = Liveness(clock, silence_s=5)
    clock.advance(20)
    liveness.end_pause(1)
    assert not liveness.is_lost
    clock.advance(4.1)
    assert liveness.is_lost
    liveness.record_data()
    clock.advance(0.5)
    liveness.end_pause(1)  # after less than the interval
    clock.advance(4.6)
    assert liveness.is_lost

"""The trace of a request: its spans leave no gap and agree with its usage row, and lost spans affect no request."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from typing import Any

import msgspec
import pytest
from prometheus_client import generate_latest

from moiety_platform.engine_client.fake import FakeEngineClient, report_counts
from moiety_platform.engine_client.fake import FakeVerdict as EngineVerdict
from moiety_platform.traces.exporters import EXPORT_TIMEOUT_S, store_exporter
from moiety_platform.traces.sampling import EndedRequest, Sampler, SamplingDecision, SamplingTerms
from moiety_platform.traces.sender import QUEUE_FULL, SpanSender
from moiety_platform.traces.span import Span
from moiety_platform.traces.tracing import parse_traceparent
from moiety_wire.codec import encode_notes, encode_step
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit
from moiety_wire.trace_events import Event, EventKind, Reason, StepNote

from .conftest import NewCard, RunningGateway, SpanList, StartGateway, unanswering_port

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
MESSAGES = BODY | {"max_tokens": 3}
EMBED: dict[str, Any] = {"model": "tiny", "input": ["one", "two"]}
GATEWAYS_OWN = ["receive", "prepare", "quota.hold", "admission", "answer", "quota.settle"]
AT_ENGINE = ["engine.queue", "engine.prefill", "engine.decode"]
MOVES, PREEMPTED = 5, 6  # tokens, which tell the engines what to do
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def traces_of(spans: list[Span]) -> Any:
    """The root of each request, and what is under it."""
    roots = [span for span in spans if "moiety.outcome" in span.attributes]
    return [(root, [span for span in spans if span.parent_id == root.span_id]) for root in roots]


def covered(root: Any, children: Any) -> float:
    """The share of the root's time in which at least one child is open."""
    total, reached = 0, root.start_ns
    for span in sorted(children, key=lambda span: span.start_ns):
        total += max(0, min(span.end_ns, root.end_ns) - max(span.start_ns, reached))
        reached = max(reached, span.end_ns)
    return total / (root.end_ns - root.start_ns)


async def ask_everything(gateway: RunningGateway) -> int:
    """Send requests of every kind, valid and invalid; return how many left a usage row."""
    for path, body in (
        (CHAT, BODY),
        (CHAT, BODY | {"stream": True}),
        (CHAT, BODY | {"n": 3}),
        ("/v1/completions", {"model": "tiny", "prompt": ["a", "bc"], "max_tokens": 2}),
        ("/v1/messages", MESSAGES),
        ("/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 3}),
        ("/v1/embeddings", EMBED),
        (CHAT, BODY | {"max_tokens": 100_000}),
        (CHAT, BODY | {"model": "none"}),
        (CHAT, b"{"),
    ):
        await gateway.post(path, body)
    return 10


async def test_children_cover_all_of_a_request_and_its_tokens_are_those_of_its_row(
    start_gateway: StartGateway, new_card: NewCard, spans: SpanList
) -> None:
    engine = FakeEngineClient(new_card(embedding_width=8))
    async with start_gateway([engine], spans) as gateway:
        rows = await gateway.rows.wait_for(await ask_everything(gateway))
        by_request = {row.request_id: row for row in rows}
    traces = traces_of(spans.spans)
    assert len(traces) == len(rows) == 10
    for root, children in traces:
        row = by_request[root.attributes["moiety.request_id"]]
        tokens = [root.attributes[f"gen_ai.usage.{side}_tokens"] for side in ("input", "output")]
        assert tokens == [row.prompt_tokens, row.output_tokens]
        at_engines = [span for span in children if span.name == "engine.decode"]
        if not row.endpoint.endswith("embeddings"):
            assert sum(span.attributes["gen_ai.usage.output_tokens"] for span in at_engines) == row.output_tokens
        assert covered(root, children) >= 0.99
        assert (root.error, root.attributes.get("error.type")) == (row.error_code, row.error_code)
        assert {span.trace_id for span in children} == {root.trace_id}
    assert len({span.span_id for span in spans.spans}) == len(spans.spans)


async def test_many_requests_of_every_end_at_once_leave_a_whole_trace_each(
    start_gateway: StartGateway, new_card: NewCard, spans: SpanList
) -> None:
    """`MOIETY_TRACE_REQUESTS=2000` sends so many."""
    lost = set()

    def script(submit: Submit) -> Any:
        if submit.stopping.max_tokens == MOVES and submit.request_id not in lost:
            lost.add(submit.request_id)
            return Failed(submit.request_id, 0, FailureCode.ENGINE_FAILED, "gone")
        return report_counts(submit)

    def verdict(submit: Submit) -> Any:
        events = (Event(1, EventKind.PREEMPTED, Reason.OVER_SHARE),) if submit.stopping.max_tokens == PREEMPTED else ()
        return EngineVerdict("standard", events=events)

    cards = [new_card(f"engine-{i}", max_context_tokens=2000) for i in range(2)]
    engines = [FakeEngineClient(card, script, verdict=verdict, token_s=0.001) for card in cards]
    count = int(os.environ.get("MOIETY_TRACE_REQUESTS", "100"))
    async with start_gateway(engines, spans) as gateway:
        room = asyncio.Semaphore(32)

        async def ask(number: int) -> None:
            body: dict[str, Any] = {
                "max_tokens": (4, MOVES, PREEMPTED, 100_000, 500)[number % 5],
                "stream": number % 2 == 0,
            }
            async with room:
                if number % 5 == 4:
                    await hang_up(gateway, BODY | body)
                else:
                    await gateway.post(CHAT, BODY | body)

        await asyncio.gather(*(ask(number) for number in range(count)))
        rows = {row.request_id: row for row in await gateway.rows.wait_for(count)}
    traces = traces_of(spans.spans)
    assert Counter(root.attributes["moiety.request_id"] for root, _ in traces) == Counter(rows.keys())
    for root, children in traces:
        row = rows[root.attributes["moiety.request_id"]]
        assert covered(root, children) >= 0.99
        tokens = [root.attributes[f"gen_ai.usage.{side}_tokens"] for side in ("input", "output")]
        assert (tokens, root.attributes["moiety.outcome"]) == ([row.prompt_tokens, row.output_tokens], row.outcome)
        at_engines = [span for span in children if span.name == "engine.decode"]
        assert sum(span.attributes["gen_ai.usage.output_tokens"] for span in at_engines) == row.output_tokens
        attempts = [span for span in children if span.name == "engine.attempt"]
        assert len(attempts) == root.attributes.get("moiety.failovers", 0)
        linked = [link for span in children for link in span.links]
        assert linked == [(span.trace_id, span.span_id) for span in attempts]
    outcomes = Counter(row.outcome for row in rows.values())
    assert outcomes == {"length": 3 * count // 5, "rejected": count // 5, "disconnected": count // 5}
    kept_for = Counter(root.attributes["moiety.kept_for"] for root, _ in traces)
    assert (kept_for["failed_over"], kept_for["preempted"]) == (count // 5, count // 5)


async def hang_up(gateway: RunningGateway, body: dict[str, Any]) -> None:
    """Disconnect after the first bytes of a streamed answer, or at once if it is not streamed."""
    reader, writer = await asyncio.open_connection(*gateway.address)
    data = json.dumps(body).encode()
    head = f"Host: test\r\nAuthorization: Bearer {gateway.key}\r\nContent-Length: {len(data)}"
    writer.write(f"POST {CHAT} HTTP/1.1\r\n{head}\r\n\r\n".encode() + data)
    if body["stream"]:
        await reader.readuntil(b"data: ")
    else:
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_the_phases_come_in_their_order_and_those_of_an_engine_once_a_sequence(
    start_gateway: StartGateway, card: ModelCard, spans: SpanList
) -> None:
    async with start_gateway([FakeEngineClient(card)], spans) as gateway:
        await gateway.post(CHAT, BODY | {"n": 2})
        await gateway.rows.wait_for(1)
    ((root, children),) = traces_of(spans.spans)
    assert [span.name for span in children] == GATEWAYS_OWN + AT_ENGINE * 2
    own = children[: len(GATEWAYS_OWN)]
    assert [span.end_ns for span in own] == [*(span.start_ns for span in own[1:]), root.end_ns]
    assert [span.attributes["moiety.sequence"] for span in children[len(own) :]] == [0, 0, 0, 1, 1, 1]
    assert root.name == "chat tiny"
    assert {span.attributes["moiety.tenant_id"] for span in children} == {root.attributes["moiety.tenant_id"]}


async def test_scheduler_events_are_in_the_span_of_their_phase(
    start_gateway: StartGateway, card: ModelCard, spans: SpanList
) -> None:
    now = time.time_ns()
    events = (
        Event(now - 10**9, EventKind.DELAYED, Reason.BATCH_FULL),
        Event(now + 10**12, EventKind.PREEMPTED, Reason.DECODE_NEEDS_BLOCKS, "another"),
        Event(now + 10**12, EventKind.RESUMED, Reason.RECOMPUTE),
    )
    engine = FakeEngineClient(card, verdict=lambda submit: EngineVerdict("standard", events=events))
    async with start_gateway([engine], spans) as gateway:
        await gateway.post(CHAT, BODY)
        await gateway.rows.wait_for(1)
    ((root, children),) = traces_of(spans.spans)
    told = {span.name: [(one.name, dict(one.attributes)) for one in span.events] for span in children}
    assert told["engine.queue"] == [("moiety.delayed", {"moiety.reason": "batch_full"})]
    preempted = {"moiety.reason": "decode_needs_blocks", "moiety.beneficiary": "another"}
    assert told["engine.decode"] == [
        ("moiety.preempted", preempted),
        ("moiety.resumed", {"moiety.reason": "recompute"}),
    ]
    assert root.attributes["moiety.kept_for"] == "preempted"


async def test_a_request_links_to_the_steps_that_it_ran_in_and_each_of_them_is_sent_once(
    start_gateway: StartGateway, card: ModelCard, spans: SpanList
) -> None:
    def step(number: int, begin_ns: int, end_ns: int) -> msgspec.Raw:
        counts: dict[str, Any] = {"num_decodes": 3, "num_prefills": 1, "num_prefill_tokens": 40, "num_preempted": 2}
        more: dict[str, Any] = {"num_output_tokens": 4, "num_waiting": 7, "kv_blocks_used": 5, "kv_blocks_total": 50}
        classes = {"flex": 1, "batch": 3}
        more |= {"classes": classes, "active_experts": 5.5, "balancedness": 0.25}
        return encode_step(StepNote(number.to_bytes(16), number, begin_ns, end_ns, 0.5, **counts, **more))

    far = time.time_ns() + 10**12  # after the first token
    steps = encode_notes(9, [step(7, 1, 2), step(8, far, far + 10**7)])
    engine = FakeEngineClient(card, verdict=lambda submit: EngineVerdict("standard", steps=steps))
    async with start_gateway([engine], spans) as gateway:
        for body in (BODY, BODY | {"n": 2}):
            await gateway.post(CHAT, body)
        await gateway.rows.wait_for(2)
    first, second = [span for span in spans.spans if span.name == "engine.step"]
    assert (first.trace_id, first.span_id, first.parent_id) == (f"{7:032x}", f"{7:016x}", None)
    assert second.end_ns - second.start_ns == 10**7
    assert not {"moiety.tenant_id", "moiety.request_id"} & first.attributes.keys(), "it is several tenants'"
    told = {name.removeprefix("moiety.step."): value for name, value in first.attributes.items()}
    assert (told["decodes"], told["prefill_tokens"], told["preempted"], told["predicted_s"]) == (3, 40, 2, 0.5)
    assert told["classes"] == ("3 batch", "1 flex")
    assert (told["active_experts"], told["balancedness"]) == (5.5, 0.25)
    for _, children in traces_of(spans.spans):
        at_engine = [span for span in children if span.name in AT_ENGINE]
        assert {span.attributes["moiety.steps_seen"] for span in at_engine} == {9}
        links = {span.name: [link.span_id for link in span.links] for span in at_engine}
        assert links["engine.decode"] == [second.span_id]


async def test_an_engine_with_an_unknown_step_format_does_not_lose_the_trace(
    start_gateway: StartGateway, card: ModelCard, spans: SpanList
) -> None:
    engine = FakeEngineClient(card, verdict=lambda submit: EngineVerdict("standard", steps=b"\x93 of a later release"))
    async with start_gateway([engine], spans) as gateway:
        assert (await gateway.post(CHAT, BODY))[0] == 200
        await gateway.rows.wait_for(1)
    ((_, children),) = traces_of(spans.spans)
    assert [span.name for span in children] == GATEWAYS_OWN + AT_ENGINE


async def test_a_refusal_breaks_the_phase_that_it_came_up_in(
    start_gateway: StartGateway, card: ModelCard, spans: SpanList
) -> None:
    async with start_gateway([FakeEngineClient(card)], spans) as gateway:
        limit: dict[str, Any] = {"level": "key", "scope_id": gateway.key[4:20], "kind": "tokens_per_day", "cap": 1}
        status, _, _ = await gateway.request("PUT", "/admin/v1/quotas", json.dumps(limit).encode(), gateway.admin_key)
        assert status == 200
        assert (await gateway.post(CHAT, BODY))[0] == 429
        assert (await gateway.post(CHAT, b"[]"))[0] == 400
        await gateway.rows.wait_for(2)
    (_, limited), (_, wrong) = traces_of(spans.spans)
    assert [(span.name, span.error) for span in limited][-2:] == [
        ("quota.hold", "request_exceeds_quota"), ("quota.settle", None),
    ]  # fmt: skip
    assert [(span.name, span.error) for span in wrong] == [("receive", "invalid_json"), ("quota.settle", None)]


async def test_only_notable_traces_are_sampled_with_a_rate_of_zero(
    start_gateway: StartGateway, card: ModelCard, spans: SpanList
) -> None:
    nothing = SamplingTerms(rate=0.0, first_per_s=0)
    events: list[Any] = []
    engine = FakeEngineClient(card, verdict=lambda submit: EngineVerdict("standard", events=tuple(events)))
    async with start_gateway([engine], spans, sampling=nothing) as gateway:
        await gateway.post(CHAT, BODY)
        events.append(Event(1, EventKind.PREEMPTED, Reason.OVER_SHARE))
        await gateway.post(CHAT, BODY)
        rows = await gateway.rows.wait_for(2)
        metrics = generate_latest(gateway.metrics.registry).decode()
    assert [root.attributes["moiety.request_id"] for root, _ in traces_of(spans.spans)] == [rows[1].request_id]
    assert 'moiety_trace_verdicts_total{verdict="unsampled"} 1.0' in metrics
    assert 'moiety_trace_verdicts_total{verdict="preempted"} 1.0' in metrics


def ending(trace_id: str = "a" * 32, salt: bytes = b"s" * 32, **what: Any) -> EndedRequest:
    plain: dict[str, Any] = {
        "service_class": "standard", "has_failed": False, "slo_attained": True, "num_preemptions": 0,
        "num_failovers": 0,
    }  # fmt: skip
    return EndedRequest(trace_id=trace_id, salt=salt, **plain | what)


def kept_of(ids: Any, salt: bytes = b"s" * 32) -> set[str]:
    sampler = Sampler(SamplingTerms(rate=0.25, first_per_s=0, max_per_s=10**9))
    return {one for one in ids if sampler.decide(ending(one, salt=salt), 0.0).is_kept}


@pytest.mark.parametrize(
    ("what", "verdict"),
    [
        ({"has_failed": True, "slo_attained": False}, SamplingDecision.FAILED),
        ({"slo_attained": False}, SamplingDecision.SLO_MISSED),
        ({"num_preemptions": 1}, SamplingDecision.PREEMPTED),
        ({"num_failovers": 1}, SamplingDecision.FAILED_OVER),
        ({"slo_attained": None}, SamplingDecision.UNSAMPLED),
        ({"service_class": "priority"}, SamplingDecision.RATE),
    ],
)
def test_failures_and_missed_slos_are_sampled_and_classes_have_separate_rates(
    what: dict[str, Any], verdict: Any
) -> None:
    sampler = Sampler(SamplingTerms(rate=0.0, rates={"priority": 1.0}, first_per_s=0))
    assert sampler.decide(ending(**what), 0.0) is verdict


def test_sampling_is_decided_by_trace_and_clients_cannot_influence_it() -> None:
    ids = [f"{number:032x}" for number in range(4000)]
    kept = kept_of(ids)
    assert 0.22 < len(kept) / len(ids) < 0.28
    assert kept == kept_of(reversed(ids)), "by whichever gateway"
    assert len(kept & kept_of(ids, b"another tenant's")) < 0.35 * len(kept)


def test_the_first_of_every_second_is_kept_and_no_more_than_the_budget() -> None:
    sampler = Sampler(SamplingTerms(rate=0.0, first_per_s=1, max_per_s=3))
    assert [sampler.decide(ending(), second) for second in (0.0, 0.9, 1.0)] == [
        SamplingDecision.FIRST, SamplingDecision.UNSAMPLED, SamplingDecision.FIRST,
    ]  # fmt: skip
    verdicts = Counter(sampler.decide(ending(has_failed=True), 5.0) for _ in range(10))
    assert verdicts == {SamplingDecision.FAILED: 3, SamplingDecision.OVER_BUDGET: 7}


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", True),
        (f"cc-{TRACE}-00f067aa0ba902b7-01-what-comes-later", True),
        (f"00-{TRACE}-00f067aa0ba902b7-01-more", False),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", False),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", False),
        ("", False),
    ],
)
def test_a_clients_context_is_taken_as_the_w3c_writes_it(text: str, is_valid: bool) -> None:
    assert (parse_traceparent(text) is not None) is is_valid


@pytest.mark.parametrize("store", ["away", "silent"])
async def test_a_store_that_is_away_or_silent_slows_no_request_and_its_spans_are_counted(
    start_gateway: StartGateway, card: ModelCard, store: str
) -> None:
    with unanswering_port(is_listening=store == "silent") as port:
        sender = SpanSender(
            "store", store_exporter(f"http://127.0.0.1:{port}", "a token"), "g", capacity=60, interval_s=0.01
        )
        async with start_gateway([FakeEngineClient(card)], sender) as gateway:
            answers = await asyncio.gather(*(gateway.post(CHAT, BODY) for _ in range(40)))
            assert {status for status, _, _ in answers} == {200}
            rows = await gateway.rows.wait_for(40)
            assert max(row.duration_ms for row in rows) < EXPORT_TIMEOUT_S * 1000
            text = generate_latest(gateway.metrics.registry).decode()
        began = time.monotonic()
        await asyncio.to_thread(sender.close, 0.1)
        assert time.monotonic() - began < EXPORT_TIMEOUT_S
    assert f'moiety_spans_dropped_total{{destination="store",reason="{QUEUE_FULL}"}}' in text
    assert sender.num_sent == 0
    assert sender.dropped[QUEUE_FULL] % (len(GATEWAYS_OWN) + len(AT_ENGINE) + 1) == 0, "whole traces"

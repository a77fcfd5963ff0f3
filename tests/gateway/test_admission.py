"""Classes, verdicts and refusals, as clients, administrators and the operator's figures see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from moiety_platform.admission.gate import AdmissionGate, refuse_unattainable
from moiety_platform.clock import ManualClock
from moiety_platform.engine_client.fake import FakeEngineClient, FakeVerdict, report_counts
from moiety_platform.errors import Overloaded
from moiety_platform.inference.slo import SloProgress, slo_attained, slo_missed
from moiety_wire.classes import BATCH, FLEX, PRIORITY, STANDARD
from moiety_wire.engine_load import ClassLoad
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit
from moiety_wire.trace_events import Event, EventKind, Reason

from .conftest import NewCard, RunningGateway, SpanList, StartGateway, Until

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
REJECTED = {"retry-after": "3", "x-moiety-reason": "predicted_late"}


def rejects(submit: Submit) -> Any:
    return Failed(submit.request_id, 0, FailureCode.OVERLOADED, "not now", 0, Reason.PREDICTED_LATE, 2.1)


def class_load(name: str, predicted_ttft_s: float | None = 0.0, **changes: Any) -> ClassLoad:
    fields: dict[str, Any] = dict.fromkeys(ClassLoad.__struct_fields__, 0) | {
        "rejected_total": {},
        "preempted_total": {},
    }
    return ClassLoad(**{**fields, "name": name, "predicted_ttft_s": predicted_ttft_s, **changes})


async def set_tenant_class(gateway: RunningGateway, name: str) -> None:
    (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
    await gateway.admin("PATCH", f"/tenants/{tenant['id']}", {"service_class": name})
    gateway.forget_keys()


# ── which class a request gets ──


@pytest.mark.parametrize(
    ("cap", "tier", "served", "stated"),
    [
        ("standard", None, "standard", "default"),
        ("standard", "auto", "standard", "default"),
        ("standard", "priority", "standard", "default"),  # capped, and said so
        ("standard", "flex", "flex", "flex"),
        ("priority", None, "priority", "priority"),
        ("priority", "default", "standard", "default"),
        ("priority", "flex", "flex", "flex"),
        ("flex", "default", "flex", "flex"),
        ("batch", "flex", "batch", "flex"),
        ("batch", "priority", "batch", "flex"),
    ],
)
async def test_a_tier_chooses_below_the_tenants_class_and_the_answer_states_what_was_served(
    gateway: RunningGateway, cap: str, tier: str | None, served: str, stated: str
) -> None:
    await set_tenant_class(gateway, cap)
    options = {} if tier is None else {"service_tier": tier}
    raw = await gateway.client.chat.completions.with_raw_response.create(
        model="tiny", messages=HELLO, max_tokens=2, **options
    )
    assert raw.parse().service_tier == stated
    assert (raw.headers["x-moiety-class"], raw.headers["x-moiety-admission"]) == (served, "in_time")
    stream = await gateway.client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=2, stream=True, **options
    )
    assert {chunk.service_tier async for chunk in stream} == {stated}
    assert stream.response.headers["x-moiety-class"] == served
    assert [submit.service.name for submit in gateway.engine.submits] == [served, served]
    assert [row.service_class for row in await gateway.rows.wait_for(2)] == [served, served]


async def test_a_class_of_ones_own_comes_with_the_tenant_and_is_stated_by_its_rank(gateway: RunningGateway) -> None:
    await gateway.admin("POST", "/classes", {"name": "bronze", "rank": 1, "ttft_s": 9.0}, 201)
    await set_tenant_class(gateway, "bronze")
    for tier, served in ((None, "bronze"), ("default", "bronze"), ("priority", "bronze"), ("flex", "flex")):
        status, headers, answer = await gateway.post(CHAT, BODY | ({} if tier is None else {"service_tier": tier}))
        assert (status, headers["x-moiety-class"]) == (200, served)
        assert json.loads(answer)["service_tier"] == ("flex" if served == "flex" else "default")
    assert gateway.engine.submits[0].service.ttft_s == 9.0


async def test_an_edit_of_a_class_holds_for_the_next_request_without_a_restart(gateway: RunningGateway) -> None:
    await gateway.post(CHAT, BODY)
    change: dict[str, Any] = {"ttft_s": 0.75, "tpot_s": None, "on_overload": "downgrade", "downgrade_to": "flex"}
    await gateway.admin("PATCH", "/classes/standard", change)
    await gateway.post(CHAT, BODY)
    before, after = gateway.engine.submits
    assert (before.service, before.fallback) == (STANDARD, None)
    assert (after.service.ttft_s, after.service.tpot_s, after.fallback) == (0.75, None, FLEX)


# ── downgrades ──


@pytest.mark.parametrize("stream", [False, True])
async def test_a_downgraded_request_is_stated_as_it_was_served(
    start_gateway: StartGateway, card: ModelCard, stream: bool
) -> None:
    engine = FakeEngineClient(card, verdict=lambda submit: FakeVerdict("flex", Reason.PREDICTED_LATE))
    async with start_gateway([engine]) as gateway:
        await gateway.admin("PATCH", "/classes/standard", {"on_overload": "downgrade", "downgrade_to": "flex"})
        status, headers, answer = await gateway.post(CHAT, BODY | {"stream": stream})
        assert status == 200
        assert (headers["x-moiety-class"], headers["x-moiety-admission"]) == ("flex", "predicted_late")
        events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")] if stream else [answer]
        assert {json.loads(event)["service_tier"] for event in events} == {"flex"}
        (row,) = await gateway.rows.wait_for(1)
        assert (row.service_class, row.slo_attained) == ("flex", True)
        text = generate_latest(gateway.metrics.registry).decode()
        assert (
            'moiety_admission_total{outcome="downgraded",reason="predicted_late",service_class="standard"} 1.0' in text
        )
        assert 'moiety_slo_requests_total{attained="true",model="tiny",service_class="flex"} 1.0' in text


async def test_a_request_of_several_sequences_is_served_as_the_lowest_of_them(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    def verdict(submit: Submit) -> Any:
        return FakeVerdict("flex", Reason.KV_PEAK) if submit.request_id.endswith("-1") else FakeVerdict("standard")

    async with start_gateway([FakeEngineClient(card, verdict=verdict)]) as gateway:
        await gateway.admin("PATCH", "/classes/standard", {"on_overload": "downgrade", "downgrade_to": "flex"})
        _, headers, answer = await gateway.post(CHAT, BODY | {"n": 3})
        assert (headers["x-moiety-class"], json.loads(answer)["service_tier"]) == ("flex", "flex")


# ── rejections ──


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_client_sees_a_rate_limit_with_the_time_to_come_back(
    start_gateway: StartGateway, card: ModelCard, stream: bool
) -> None:
    async with start_gateway([FakeEngineClient(card, rejects)]) as gateway:
        with pytest.raises(openai.RateLimitError, match="not now") as caught:
            await gateway.client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
        assert {name: caught.value.response.headers[name] for name in REJECTED} == REJECTED
        assert "x-moiety-class" not in caught.value.response.headers
        assert (caught.value.code, caught.value.type) == ("overloaded", "rate_limit_error")
        assert caught.value.body["reason"] == "predicted_late"
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("rejected", 429, "overloaded")
        assert (row.prompt_tokens, row.output_tokens, row.slo_attained) == (0, 0, False)
        text = generate_latest(gateway.metrics.registry).decode()
        assert 'moiety_admission_total{outcome="rejected",reason="predicted_late",service_class="standard"} 1.0' in text


async def test_the_openai_client_comes_back_by_itself_and_is_served(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    tries = []

    def rejects_once(submit: Submit) -> Any:
        tries.append(submit)
        if len(tries) == 1:
            return Failed(submit.request_id, 0, FailureCode.OVERLOADED, "not now", 0, Reason.QUEUE_FULL, 0.2)
        return report_counts(submit)

    async with start_gateway([FakeEngineClient(card, rejects_once)]) as gateway:
        client = gateway.client.with_options(max_retries=1)
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
        assert answer.choices[0].message.content == "1 2"
        assert [row.outcome for row in await gateway.rows.wait_for(2)] == ["rejected", "length"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, BODY | {"n": 4}),
        ("/v1/completions", {"model": "tiny", "prompt": ["a", "b", "c", "d"], "max_tokens": 500}),
    ],
)
async def test_one_rejected_sequence_takes_the_others_along_and_nothing_is_billed(
    start_gateway: StartGateway, card: ModelCard, until: Until, path: Any, body: Any, stream: bool
) -> None:
    def rejects_the_third(submit: Submit) -> Any:
        return rejects(submit) if submit.request_id.endswith("-2") else report_counts(submit)

    engine = FakeEngineClient(card, rejects_the_third)
    async with start_gateway([engine]) as gateway:
        status, headers, answer = await gateway.post(path, body | {"stream": stream})
        assert (status, headers["x-moiety-reason"], headers["retry-after"]) == (429, "predicted_late", "3")
        assert json.loads(answer)["error"]["code"] == "overloaded"
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.prompt_tokens, row.output_tokens, row.num_choices) == ("rejected", 0, 0, 4)
        await until(lambda: engine.state.num_inflight == 0)


async def test_a_stream_answers_nothing_before_the_last_verdict(start_gateway: StartGateway, card: ModelCard) -> None:
    """The first sequences have tokens long before the last is turned away; the status is still its own."""
    verdict_is_due = asyncio.Event()

    class Slow(FakeEngineClient):
        async def _answer(self, run: Any) -> None:
            if run.submit.request_id.endswith("-1"):
                await verdict_is_due.wait()
            await super()._answer(run)

    def rejects_the_second(submit: Submit) -> Any:
        return rejects(submit) if submit.request_id.endswith("-1") else report_counts(submit)

    engine = Slow(card, rejects_the_second)
    async with start_gateway([engine]) as gateway:
        asked = asyncio.create_task(gateway.post(CHAT, BODY | {"n": 2, "stream": True}))
        while not any(run.num_emitted for run in list(engine._running.values())):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        verdict_is_due.set()
        assert (await asked)[0] == 429


@pytest.mark.parametrize("seq", [0, 1])
async def test_a_verdict_that_is_there_before_it_is_waited_for_counts_no_less(
    start_gateway: StartGateway, card: ModelCard, seq: int
) -> None:
    """The first sequence's tokens stand before the other's rejection in the inbox; the status is still its own."""

    class Quick(FakeEngineClient):
        @asynccontextmanager
        async def open(self, submit: Submit, inbox: Any = None) -> AsyncIterator[Any]:
            async with super().open(submit, inbox) as stream:
                for _ in range(20):
                    await asyncio.sleep(0)  # it answers meanwhile
                assert stream.num_output_tokens == (0 if submit.request_id.endswith("-1") else 2)
                yield stream

    def rejects_the_second(submit: Submit) -> Any:
        failed = msgspec.structs.replace(rejects(submit), seq=seq)
        return failed if submit.request_id.endswith("-1") else report_counts(submit)

    async with start_gateway([Quick(card, rejects_the_second)]) as gateway:
        status, _, _ = await gateway.post(CHAT, BODY | {"n": 2, "stream": True})
        (row,) = await gateway.rows.wait_for(1)
        assert (status, row.outcome, row.output_tokens) == (429, "rejected", 0)


async def test_a_request_that_is_shed_from_the_queue_is_rejected_like_the_others(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(
        card, lambda submit: Failed(submit.request_id, 1, FailureCode.OVERLOADED, "dropped", 0, Reason.SHED, None)
    )
    async with start_gateway([engine]) as gateway:
        status, headers, _ = await gateway.post(CHAT, BODY | {"stream": True})
        assert (status, headers["x-moiety-reason"], headers["retry-after"]) == (429, "shed", "1")
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.prompt_tokens) == ("rejected", 0)


# ── the gate ──


async def test_a_tenant_may_have_only_so_much_in_flight(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    engine = FakeEngineClient(card, lambda submit: ((65, "x") for _ in range(10_000)))
    async with start_gateway([engine], max_inflight_per_tenant=2, credit_window_tokens=4) as gateway:
        held = []
        for _ in range(2):
            stream = await gateway.client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            held.append(stream)
        status, headers, answer = await gateway.post(CHAT, BODY)
        assert (status, headers["x-moiety-reason"]) == (429, "tenant_queue_full")
        assert int(headers["retry-after"]) >= 1
        assert "2 sequences of this tenant are in flight" in json.loads(answer)["error"]["message"]
        assert len(engine.submits) == 2
        for stream in held:
            await stream.close()
        await until(lambda: engine.state.num_inflight == 0)
        engine.script = report_counts
        assert (await gateway.post(CHAT, BODY))[0] == 200
        rows = await gateway.rows.wait_for(4)
        assert sorted(row.outcome for row in rows) == ["disconnected", "disconnected", "length", "rejected"]
        reason = 'moiety_admission_total{outcome="rejected",reason="tenant_queue_full",service_class="standard"} 1.0'
        assert reason in generate_latest(gateway.metrics.registry).decode()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.floats(0, 100)), max_size=30), st.integers(1, 8))
def test_a_gate_never_lets_a_tenant_over_its_bound_and_forgets_who_has_left(steps: Any, limit: Any) -> None:
    clock = ManualClock()
    gate = AdmissionGate(limit, clock)
    held: list[Any] = []
    for tenant, number, wait_s in steps:
        clock.advance(wait_s)
        inflight = sum(count for who, count, _ in held if who == tenant)
        if inflight and inflight + number > limit:
            with pytest.raises(Overloaded) as caught:
                gate.reserve(str(tenant), number)
            assert 1 <= caught.value.retry_after_s <= 60
            _, _, oldest = held.pop(0)
            oldest.release()
        else:
            held.append((tenant, number, gate.reserve(str(tenant), number)))
    for _, _, place in held:
        place.release()
    assert not gate._tenants


@pytest.mark.parametrize(
    ("service", "load", "refused"),
    [
        (STANDARD, class_load("standard", 61.0), True),  # twice 30 s
        (STANDARD, class_load("standard", 60.0), False),
        (FLEX, class_load("flex", 1e9), False),  # it queues
        (msgspec.structs.replace(STANDARD, on_overload="downgrade"), class_load("standard", 1e9), False),
        (STANDARD, None, False),
    ],
)
def test_only_requests_that_no_engine_can_admit_are_refused_before_they_are_sent(
    service: Any, load: Any, refused: bool
) -> None:
    refusal = refuse_unattainable(service, load)
    assert (refusal is not None) == refused
    if refusal is not None:
        assert (refusal.reason, refusal.retry_after_s) == (Reason.PREDICTED_LATE, 31.0)


async def test_requests_that_cannot_be_admitted_are_not_sent_unless_the_load_report_is_old(
    gateway: RunningGateway,
) -> None:
    gateway.engine.class_loads = [class_load("standard", 100.0), class_load("flex", 100.0)]
    status, headers, answer = await gateway.post(CHAT, BODY)
    assert (status, headers["x-moiety-reason"], headers["retry-after"]) == (429, "predicted_late", "70")
    assert "lower service_tier" in json.loads(answer)["error"]["message"]
    assert gateway.engine.submits == []
    assert (await gateway.post(CHAT, BODY | {"service_tier": "flex"}))[0] == 200
    for age_s in (None, 2.5):
        gateway.engine.load_age_s = age_s
        assert (await gateway.post(CHAT, BODY))[0] == 200
    rows = await gateway.rows.wait_for(4)
    assert [row.outcome for row in rows] == ["rejected", "length", "length", "length"]


async def test_the_engine_with_the_shorter_predicted_wait_is_chosen(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    slow, quick = FakeEngineClient(new_card("slow")), FakeEngineClient(new_card("quick"))
    slow.class_loads, quick.class_loads = [class_load("standard", 500.0)], [class_load("standard", 1.0)]
    async with start_gateway([slow, quick]) as gateway:
        assert (await gateway.post(CHAT, BODY))[0] == 200
        assert (len(slow.submits), len(quick.submits)) == (0, 1)


# ── figures ──


async def test_admission_results_are_in_the_usage_row_the_span_and_the_metrics(
    start_gateway: StartGateway, card: ModelCard, spans: SpanList
) -> None:
    events = (
        Event(1, EventKind.PREEMPTED, Reason.DECODE_NEEDS_BLOCKS, "another"),
        Event(2, EventKind.RESUMED, Reason.RECOMPUTE),
        Event(3, EventKind.PREEMPTED, Reason.OVER_SHARE),
    )
    engine = FakeEngineClient(card, verdict=lambda submit: FakeVerdict("standard", Reason.ACCEPTED_LATE, events=events))
    engine.class_loads = [
        class_load(
            "flex",
            2.5,
            num_waiting=3,
            num_running=4,
            admitted_total=9,
            rejected_total={"shed": 2},
            preempted_total={"over_share": 5},
            demoted_total=6,
            boosted_total=7,
            recomputed_tokens_total=8,
        )
    ]
    async with start_gateway([engine], spans) as gateway:
        await gateway.post(CHAT, BODY)
        (row,) = await gateway.rows.wait_for(1)
        assert (row.num_preemptions, row.slo_attained) == (2, True)
        text = generate_latest(gateway.metrics.registry).decode()
    (span,) = spans.named("chat tiny")
    told = {name: span.attributes[f"moiety.{name}"] for name in ("admission", "reason", "preemptions", "slo_attained")}
    assert told == {"admission": "admitted", "reason": "accepted_late", "preemptions": 2, "slo_attained": True}
    labels = 'engine="fake://engine-1",service_class="flex"'
    for line in (
        f"moiety_engine_class_num_waiting{{{labels}}} 3.0",
        f"moiety_engine_class_num_running{{{labels}}} 4.0",
        f"moiety_engine_class_predicted_ttft_seconds{{{labels}}} 2.5",
        f"moiety_engine_class_admitted_total{{{labels}}} 9.0",
        'moiety_engine_class_rejected_total{engine="fake://engine-1",reason="shed",service_class="flex"} 2.0',
        'moiety_engine_class_preempted_total{engine="fake://engine-1",reason="over_share",service_class="flex"} 5.0',
        f"moiety_engine_class_demoted_total{{{labels}}} 6.0",
        f"moiety_engine_class_boosted_total{{{labels}}} 7.0",
        f"moiety_engine_class_recomputed_tokens_total{{{labels}}} 8.0",
        'moiety_engine_host_blocks{engine="fake://engine-1"} 0.0',
        'moiety_engine_swapped_in_blocks_total{engine="fake://engine-1"} 0.0',
    ):
        assert line in text


def progress(first_s: Any = None, last_s: Any = None, tokens: int = 11, prompt: int = 1000, cached: int = 0) -> Any:
    return SloProgress(prompt, cached, tokens, first_s, last_s)


@pytest.mark.parametrize(
    ("service", "sequences", "kept"),
    [
        (STANDARD, [progress(2.2, 3.2)], True),  # 2 s + 0.2 s, then 10 × 0.1 s from that deadline
        (STANDARD, [progress(0.1, 3.2)], True),  # the pace counts from the deadline, not from the token
        (STANDARD, [progress(2.3, 3.0)], False),
        (STANDARD, [progress(2.0, 3.3)], False),
        (STANDARD, [progress(2.1, 3.0, cached=900)], False),  # what a cache held has no allowance
        (STANDARD, [progress(1.0, 2.0), progress(2.3, 2.4)], False),  # one of several is late
        (STANDARD, [progress()], False),
        (FLEX, [progress(599.0, 600.0)], True),
        (FLEX, [progress(1.0, 601.0)], False),
        (BATCH, [progress(601.0, 86_400.0)], True),
    ],
)
def test_the_slo_is_attained_if_the_first_and_the_last_token_come_by_their_deadlines(
    service: Any, sequences: list[Any], kept: bool
) -> None:
    assert slo_attained(service, sequences) == kept


def test_a_client_that_leaves_has_a_missed_slo_only_if_it_was_late_already() -> None:
    assert not slo_missed(PRIORITY, [progress(prompt=0)], 0.4)
    assert slo_missed(PRIORITY, [progress(prompt=0)], 0.6)
    assert not slo_missed(PRIORITY, [progress(0.4, 0.4, prompt=0)], 99.0)
    assert slo_missed(FLEX, [progress(1.0, 2.0)], 601.0)

"""Preemption in the real engine: a preempted request loses its slot in the batch, and nothing else.

The clock advances by a fixed amount at every reading, so that no decision depends on the speed of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from tests.core_submits import core_submit

from moiety_engine.config import EngineConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreEvent, CoreFinish, CoreSubmit
from moiety_engine.scheduling.preemption.preemption_execution import SwapCost
from moiety_engine.sequence import Sequence, SequenceState
from moiety_wire.classes import OverloadAction, ServiceClass
from moiety_wire.messages import FinishReason, Sampling
from moiety_wire.trace_events import EventKind, Reason

BLOCK_SIZE = 4
TICK_NS = 5_000_000  # a step reads the clock twice
FREE = SwapCost(0.0)
DEAR = SwapCost(1e6)
URGENT = ServiceClass(name="urgent", rank=0, ttft_s=0.3, preemptible=False, on_overload=OverloadAction.QUEUE)
FLEX = ServiceClass(name="flex", rank=2, completion_s=3600.0, max_queue_s=3600.0, on_overload=OverloadAction.QUEUE)
KEPT = msgspec.structs.replace(FLEX, name="kept", preemptible=False)  # flex that nobody may preempt


class Clock:
    """Unix nanoseconds that advance by TICK_NS at every reading."""

    def __init__(self) -> None:
        self.now_ns = 1_700_000_000 * 10**9

    def __call__(self) -> int:
        self.now_ns += TICK_NS
        return self.now_ns


@dataclass
class Engine:
    """A loop with a clock of its own, and its outputs."""

    loop: EngineLoop
    clock: Clock
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, CoreFinish] = field(default_factory=dict)

    def submit(self, *submits: CoreSubmit) -> None:
        for submit in submits:
            self.tokens[submit.key] = []
            self.loop.submit(msgspec.structs.replace(submit, arrival_unix_ns=self.clock.now_ns))

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.loop.step()
            self.collect()

    def step_until(self, holds: Callable[[], object], at_most: int = 200) -> None:
        for _ in range(at_most):
            if holds():
                return
            self.step()
        raise AssertionError(f"not within {at_most} steps")

    def run(self, at_most: int = 2000) -> None:
        self.step_until(lambda: self.loop.scheduler.idle, at_most)

    def abort(self, key: int) -> None:
        self.loop.abort(key)
        self.collect()

    def collect(self) -> None:
        step = self.loop.take_outputs()
        if step is None:
            return
        assert step.failures == []
        for output in step.outputs:
            assert output.key not in self.finishes, "a request spoke after its end"
            self.tokens[output.key] += output.token_ids
            if output.finish is not None:
                self.finishes[output.key] = output.finish

    def sequence(self, key: int) -> Sequence:
        return self.loop.scheduler.queues.by_key[key]

    def events(self, key: int, kind: EventKind) -> list[CoreEvent]:
        events = self.finishes[key].events if key in self.finishes else self.sequence(key).timeline.events
        return [event for event in events if event.kind is kind]

    def assert_nothing_is_held(self) -> None:
        scheduler = self.loop.scheduler
        assert scheduler.idle
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_paused) == (0, 0, 0)
        assert scheduler.policy.num_queued == 0
        assert scheduler.kv.pool.num_used == 0
        assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
        host = scheduler.kv.host
        assert host is None or (host.pool.num_used, host.pool.num_free) == (0, host.pool.num_blocks)


def make_engine(loops: Any, num_blocks: int, *, host_blocks: int = 0, **settings: Any) -> Engine:
    block_bytes = loops.model.kv_bytes_per_block(BLOCK_SIZE)
    config = EngineConfig(
        model=str(loops.folder),
        name="tiny",
        block_size=BLOCK_SIZE,
        kv_memory_bytes=num_blocks * block_bytes,
        host_kv_memory_bytes=host_blocks * block_bytes,
        max_context_tokens=100,
        **({"max_batch_tokens": 64} | settings),
    )
    clock = Clock()
    engine = Engine(build_loop(loops.model, config, clock_ns=clock), clock)
    assert engine.loop.load().kv_blocks_total == num_blocks
    assert engine.loop.load().host_blocks_total == host_blocks
    return engine


def make_submit(
    key: int, num_prompt: int, service: ServiceClass = FLEX, *, max_tokens: int = 40, tenant: str = "t", **sampling: Any
) -> CoreSubmit:
    prompt = torch.randint(3, 320, (num_prompt,), generator=torch.Generator().manual_seed(key)).tolist()
    return core_submit(
        key,
        prompt,
        max_tokens,
        tenant_id=tenant,
        service=service,
        sampling=Sampling(**({"temperature": 0.0} | sampling)),
        cache_salt=b"salt",
    )


# Short answers first: they teach the engine to expect short ones, so that it takes in more of the long than fit.
SHORT = [make_submit(key, 6, max_tokens=3) for key in range(1, 9)]
LONG = [
    make_submit(11, 19),
    make_submit(12, 5, temperature=1.0, seed=11),
    make_submit(13, 30, temperature=0.8, top_p=0.9, seed=12),
    make_submit(14, 11, temperature=1.2, top_k=20, seed=13),
    make_submit(15, 23, presence_penalty=0.7, repetition_penalty=1.1),
    make_submit(16, 8, temperature=0.9, min_p=0.05, frequency_penalty=0.3, seed=14),
    make_submit(17, 27),
    make_submit(18, 14, temperature=1.0, seed=15),
]
URGENT_ONES = [
    make_submit(21, 21, URGENT, max_tokens=12),
    make_submit(22, 33, URGENT, max_tokens=12, temperature=1.0, seed=21),
    make_submit(23, 9, URGENT, max_tokens=12, temperature=0.7, seed=22),
]
ALL = [*SHORT, *LONG, *URGENT_ONES]


def tokens_with_room(loops: Any, submits: Iterable[CoreSubmit]) -> dict[int, list[int]]:
    """Run each request by itself, in an engine with room, without prefix cache, and return its tokens."""
    tokens: dict[int, list[int]] = {}
    for submit in submits:
        engine = make_engine(loops, 50, prefix_caching=False)
        engine.submit(submit)
        engine.run()
        assert engine.finishes[submit.key].num_recomputed_tokens == 0
        tokens |= engine.tokens
    return tokens


@pytest.fixture(scope="module")
def alone(loops: Any) -> dict[int, list[int]]:
    return tokens_with_room(loops, ALL)


def squeeze(engine: Engine) -> None:
    """Long answers in a pool that holds few of them, and urgent requests on top."""
    engine.submit(*SHORT)
    engine.run()
    engine.submit(*LONG)
    engine.step(4)
    for submit in URGENT_ONES:
        engine.submit(submit)
        engine.step(3)
    engine.run()


def assert_as_undisturbed(engine: Engine, alone: dict[int, list[int]]) -> None:
    assert engine.tokens == alone
    for key, finish in engine.finishes.items():
        assert finish.reason is FinishReason.LENGTH
        assert finish.num_output_tokens == len(alone[key])
    engine.assert_nothing_is_held()


def preempted_keys(engine: Engine) -> list[int]:
    return [key for key in engine.finishes if engine.events(key, EventKind.PREEMPTED)]


def assert_preemptions_are_told(engine: Engine, back: set[Reason]) -> None:
    """Each has its reason and the request that profited; each was repaid; none was of an urgent request."""
    keys = preempted_keys(engine)
    urgent = {submit.key for submit in URGENT_ONES}
    assert keys
    assert not urgent & set(keys)
    seen = set()
    for key in keys:
        finish = engine.finishes[key]
        moves = [event for event in finish.events if event.kind in (EventKind.PREEMPTED, EventKind.RESUMED)]
        assert [event.kind for event in moves] == [EventKind.PREEMPTED, EventKind.RESUMED] * (len(moves) // 2)
        for event in moves[::2]:
            seen.add(event.reason)
            if event.reason is Reason.URGENT_NEEDS_BLOCKS:
                assert event.other in urgent
            else:
                assert (event.reason, event.other) == (Reason.DECODE_NEEDS_BLOCKS, 0)
        assert {event.reason for event in moves[1::2]} <= back
    assert seen == {Reason.URGENT_NEEDS_BLOCKS, Reason.DECODE_NEEDS_BLOCKS}, "the squeeze must show both"
    counted = dict.fromkeys(("urgent", "flex"), 0)
    for load in engine.loop.load().classes:
        counted[load.name] = sum(load.preempted_total.values())
    assert counted == {"urgent": 0, "flex": sum(len(engine.events(key, EventKind.PREEMPTED)) for key in keys)}


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_recomputed_requests_get_the_tokens_of_an_undisturbed_run(
    loops: Any, alone: dict[int, list[int]], prefix_caching: bool
) -> None:
    engine = make_engine(loops, 28, prefix_caching=prefix_caching)
    squeeze(engine)
    assert_as_undisturbed(engine, alone)
    assert_preemptions_are_told(engine, {Reason.RECOMPUTE, Reason.SWAP} if prefix_caching else {Reason.RECOMPUTE})
    assert sum(finish.num_recomputed_tokens for finish in engine.finishes.values()) > 0
    assert engine.loop.load().swapped_out_blocks_total == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_swapped_requests_get_the_tokens_of_an_undisturbed_run_and_compute_nothing_again(
    loops: Any, alone: dict[int, list[int]], prefix_caching: bool
) -> None:
    engine = make_engine(loops, 28, host_blocks=200, prefix_caching=prefix_caching)
    engine.loop.scheduler.swap_costs(FREE)
    squeeze(engine)
    assert_as_undisturbed(engine, alone)
    assert_preemptions_are_told(engine, {Reason.SWAP})
    assert [finish.num_recomputed_tokens for finish in engine.finishes.values()] == [0] * len(ALL)
    host = engine.loop.scheduler.kv.host
    assert host is not None
    assert min(host.copied_out_total, host.copied_in_total) > 0
    load = engine.loop.load()
    assert load.swapped_out_blocks_total == load.swapped_in_blocks_total > 0


@pytest.mark.parametrize("host_blocks", [0, 200])
def test_no_request_is_preempted_more_than_twice(loops: Any, host_blocks: int) -> None:
    engine = make_engine(loops, 28, host_blocks=host_blocks, prefix_caching=False)
    engine.loop.scheduler.swap_costs(FREE)
    squeeze(engine)
    counts = [len(engine.events(submit.key, EventKind.PREEMPTED)) for submit in LONG]
    assert max(counts) == 2


def test_a_host_tier_too_small_for_all_swaps_some_and_recomputes_others(
    loops: Any, alone: dict[int, list[int]]
) -> None:
    engine = make_engine(loops, 28, host_blocks=10, prefix_caching=False)
    engine.loop.scheduler.swap_costs(FREE)
    squeeze(engine)
    assert_as_undisturbed(engine, alone)
    back = {event.reason for key in engine.finishes for event in engine.events(key, EventKind.RESUMED)}
    assert back == {Reason.RECOMPUTE, Reason.SWAP}


def test_nothing_is_swapped_where_copying_is_dearer_than_computing(loops: Any, alone: dict[int, list[int]]) -> None:
    engine = make_engine(loops, 28, host_blocks=200, prefix_caching=False)
    engine.loop.scheduler.swap_costs(DEAR)
    squeeze(engine)
    assert_as_undisturbed(engine, alone)
    assert_preemptions_are_told(engine, {Reason.RECOMPUTE})
    assert engine.loop.load().swapped_out_blocks_total == 0


@pytest.fixture(params=["recompute", "swap"])
def full_batch(request: pytest.FixtureRequest, loops: Any) -> Iterator[Engine]:
    """Six flex requests that decode and fill the batch, with room for more in the pool."""
    engine = make_engine(loops, 120, host_blocks=200 if request.param == "swap" else 0, max_running=6)
    engine.loop.scheduler.swap_costs(FREE)
    engine.submit(*LONG[:6])
    engine.step_until(lambda: all(engine.tokens[submit.key] for submit in LONG[:6]))
    yield engine


def test_an_urgent_request_gets_a_place_in_the_very_next_step(full_batch: Engine, alone: dict[int, list[int]]) -> None:
    engine, urgent = full_batch, URGENT_ONES[0]
    assert engine.loop.load().num_running == 6
    before = {key: list(tokens) for key, tokens in engine.tokens.items()}
    engine.submit(urgent)
    engine.step()
    assert len(engine.tokens[urgent.key]) == 1
    assert engine.loop.load().num_running == 6
    (victim,) = (submit.key for submit in LONG[:6] if engine.sequence(submit.key).state is SequenceState.RETURNING)
    (event,) = engine.events(victim, EventKind.PREEMPTED)
    assert (event.reason, event.other) == (Reason.BATCH_FULL, urgent.key)
    assert engine.sequence(victim).tokens[-len(before[victim]) :] == before[victim]
    assert engine.sequence(victim).kv.blocks, "nobody needs its blocks"
    engine.run()
    assert engine.tokens == {key: alone[key] for key in engine.tokens}
    assert len(engine.events(victim, EventKind.RESUMED)) == 1
    assert all(finish.num_recomputed_tokens == 0 for finish in engine.finishes.values())
    assert preempted_keys(engine) == [victim]
    engine.assert_nothing_is_held()


def test_a_victim_is_of_the_worst_class_and_never_one_that_may_not_be_preempted(loops: Any) -> None:
    engine = make_engine(loops, 100, max_running=4)
    kept = [make_submit(key, 8, KEPT) for key in (31, 32, 33)]
    taken = make_submit(34, 8, FLEX)
    engine.submit(taken, *kept)
    engine.step_until(lambda: all(engine.tokens[submit.key] for submit in (taken, *kept)))
    engine.submit(*URGENT_ONES[:2])
    engine.step()
    places = {key: engine.sequence(key).state for key in (31, 32, 33, 34, 21, 22)}
    assert places == dict.fromkeys((31, 32, 33, 21), SequenceState.RUNNING) | {
        34: SequenceState.RETURNING,
        22: SequenceState.WAITING,
    }
    engine.run()
    assert preempted_keys(engine) == [34]
    (delay,) = engine.events(22, EventKind.DELAYED)
    assert delay.reason is Reason.BATCH_FULL
    engine.assert_nothing_is_held()


def test_non_preemptible_requests_keep_their_blocks_when_urgent_work_has_none(loops: Any) -> None:
    engine = make_engine(loops, 25)
    kept = make_submit(31, 55, KEPT, max_tokens=30)  # reserves 85 of 100 tokens
    engine.submit(kept)
    engine.step_until(lambda: engine.tokens[31])
    engine.submit(URGENT_ONES[1])
    engine.step(10)
    assert engine.sequence(22).state is SequenceState.WAITING
    assert len(engine.tokens[31]) == 11, "a token a step, undisturbed"
    engine.run()
    assert preempted_keys(engine) == []
    assert [event.reason for event in engine.events(22, EventKind.DELAYED)] == [Reason.NO_BLOCKS]
    engine.assert_nothing_is_held()


# ── aborts ──

PAUSED = msgspec.structs.replace(make_submit(41, 18, temperature=1.0, seed=41), credit_tokens=2)
CROWD = [PAUSED, *LONG[:7], *URGENT_ONES[:2]]
HELD_IN: dict[str, Callable[[Sequence], object]] = {
    "waiting": lambda s: s.state is SequenceState.WAITING,
    "half prefilled": lambda s: s.state is SequenceState.RUNNING and 0 < s.kv.num_computed < s.request.num_prompt,
    "decoding": lambda s: s.state is SequenceState.RUNNING and s.num_output > 3,
    "decoding after a preemption": lambda s: (
        s.state is SequenceState.RUNNING and s.decoding and s.timeline.num_preemptions
    ),
    "paused with its blocks": lambda s: s.state is SequenceState.PAUSED and s.kv.blocks,
    "paused without": lambda s: s.state is SequenceState.PAUSED and not s.kv.blocks,
    "returning with its blocks": lambda s: s.state is SequenceState.RETURNING and s.kv.blocks,
    "returning without": lambda s: s.state is SequenceState.RETURNING and not s.kv.blocks and not s.kv.host_blocks,
    "swapped out": lambda s: s.state is SequenceState.RETURNING and s.kv.host_blocks,
}


ROOMY = {"paused with its blocks", "returning with its blocks"}  # where nobody needs them


def make_crowd(loops: Any, num_blocks: int) -> Engine:
    """More than fits the batch, the host tier, and, if there are few blocks, the pool."""
    engine = make_engine(loops, num_blocks, host_blocks=10, prefix_caching=False, max_running=5, max_batch_tokens=24)
    engine.loop.scheduler.swap_costs(FREE)
    engine.submit(*SHORT)
    engine.run()
    engine.submit(*CROWD[:-2])
    return engine


def play_on(engine: Engine, step: int) -> None:
    """Run one more step of the scenario: urgent requests arrive, and at the end the paused one gets its credit."""
    if step in (8, 14):
        engine.submit(CROWD[-2 if step == 8 else -1])
    if step == 35:
        engine.loop.extend(PAUSED.key, PAUSED.max_tokens, last=True)
    engine.step()


@pytest.fixture(scope="module")
def paused_alone(loops: Any) -> list[int]:
    engine = make_engine(loops, 50, prefix_caching=False)
    engine.submit(msgspec.structs.replace(PAUSED, credit_tokens=PAUSED.max_tokens))
    engine.run()
    return engine.tokens[PAUSED.key]


@pytest.mark.parametrize("place", HELD_IN)
def test_an_abort_frees_what_was_held_and_disturbs_nobody(
    loops: Any, alone: dict[int, list[int]], paused_alone: list[int], place: str
) -> None:
    crowd = make_crowd(loops, 100 if place in ROOMY else 28)
    scheduler = crowd.loop.scheduler
    aborted: Sequence | None = None
    for step in range(400):
        if aborted is None:
            aborted = next((s for s in scheduler.queues.by_key.values() if HELD_IN[place](s)), None)
            if aborted is not None:
                free = scheduler.kv.pool.num_free + len(aborted.kv.blocks)
                assert scheduler.kv.host is not None
                host_free = scheduler.kv.host.pool.num_free + len(aborted.kv.host_blocks)
                crowd.abort(aborted.key)
                assert (scheduler.kv.pool.num_free, scheduler.kv.host.pool.num_free) == (free, host_free)
        play_on(crowd, step)
    assert aborted is not None, "no request was ever in this place"
    finish = crowd.finishes[aborted.key]
    expected = alone | {PAUSED.key: paused_alone}
    got = crowd.tokens.pop(aborted.key)
    assert (finish.reason, finish.num_output_tokens) == (FinishReason.ABORT, len(got))
    assert got == expected[aborted.key][: len(got)]
    assert crowd.tokens == {key: expected[key] for key in crowd.tokens}
    crowd.assert_nothing_is_held()


@pytest.mark.parametrize("num_steps", range(0, 48, 4))
def test_aborting_all_requests_frees_all_blocks(loops: Any, num_steps: int) -> None:
    crowd = make_crowd(loops, 28)
    for step in range(num_steps):
        play_on(crowd, step)
    for key in list(crowd.loop.scheduler.queues.by_key):
        crowd.abort(key)
    crowd.assert_nothing_is_held()
    assert set(crowd.finishes) == set(crowd.tokens)
    assert crowd.loop.step() is False
    assert not any(load.num_running + load.num_waiting for load in crowd.loop.load().classes)

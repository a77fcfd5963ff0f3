"""Traced steps: they report what the requests got, and their number is bounded."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.config import PolicyName
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit, TracedStep
from moiety_engine.steps.collection import MAX_STEPS, StepCollection
from moiety_engine.steps.sampler import StepSampler
from moiety_wire.classes import STANDARD
from moiety_wire.codec import decode_notes, encode_step
from moiety_wire.messages import Sampling
from moiety_wire.trace_events import StepNote

ALL_PER_S = 1000.0
BLOCK_BYTES_8 = 2 * 2 * 2 * 16 * 8 * 4  # layers · (K, V) · heads · width · tokens · float32


def submit(key: int, num_prompt: int, max_tokens: int) -> CoreSubmit:
    prompt = [3 + (key + place) % 300 for place in range(num_prompt)]
    limits: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": 0,
        "stop_token_ids": [],
        "credit_tokens": max_tokens,
    }
    sampling = Sampling(temperature=0.0)
    return CoreSubmit(key, "t", STANDARD, prompt, sampling, **limits, cache_salt=b"s", arrival_unix_ns=0)


def run(loop: EngineLoop, submits: list[CoreSubmit]) -> list[TracedStep]:
    for one in submits:
        loop.submit(one)
    traced: list[TracedStep] = []
    while not loop.scheduler.idle:
        loop.step()
        found = loop.take_outputs()
        traced += found.traced if found else []
    return traced


def clock() -> Any:
    """A clock that advances by a millisecond at each reading."""
    now_ns = 10**18

    def read() -> int:
        nonlocal now_ns
        now_ns += 10**6
        return now_ns

    return read


def test_steps_tell_what_their_requests_computed_and_got(loops: Any) -> None:
    settings: dict[str, Any] = {
        "kv_memory_bytes": 15 * BLOCK_BYTES_8,
        "max_batch_tokens": 32,
        "max_context_tokens": 100,
    }
    loop = loops.make(
        **settings, policy=PolicyName.FCFS, prefix_caching=False, traced_steps_per_s=ALL_PER_S, clock_ns=clock()
    )
    submits = [submit(key, num_prompt, 20) for key, num_prompt in enumerate((40, 3, 70, 17))]
    traced = run(loop, submits)
    steps = [one.step for one in traced]
    assert [step.number for step in steps] == list(range(loop.steps_total)), "each of them, in order"
    assert len({step.trace_id for step in steps}) == len(steps)
    assert sum(step.num_output_tokens for step in steps) == 4 * 20 == loop.scheduler.output_tokens_total
    computed = sum(step.num_decodes + step.num_prefill_tokens for step in steps)
    assert computed == 40 + 3 + 70 + 17 + 4 * 19 + loop.scheduler.recomputed_tokens_total
    assert sum(step.num_preempted for step in steps) > 0, "memory is so small"
    for one in traced:
        step = one.step
        assert step.num_decodes + step.num_prefills == len(one.keys) == len(set(one.keys))
        assert 0 < step.kv_blocks_used <= step.kv_blocks_total == loop.load().kv_blocks_total
        assert step.begin_unix_ns < step.end_unix_ns
        assert step.predicted_s is not None and step.predicted_s > 0
    ran = Counter(key for one in traced for key in one.keys)
    assert all(ran[one.key] >= 20 for one in submits)


def test_steps_are_not_traced_unless_requested(loops: Any) -> None:
    assert run(loops.make(traced_steps_per_s=0), [submit(0, 5, 4)]) == []


@given(times=st.lists(st.integers(0, 10_000), max_size=200).map(sorted), per_s=st.sampled_from([1, 4, 20]))
def test_traced_steps_are_limited_per_second_and_include_the_first_after_a_pause(times: list[int], per_s: int) -> None:
    sampler = StepSampler(per_s)
    seen = [ms for ms in times if sampler.is_due(ms * 10**6)]
    assert seen[:1] == times[:1]
    gaps = [after - before for before, after in itertools.pairwise(seen)]
    assert all(gap >= 1000 / per_s for gap in gaps)
    assert all(any(ms - 1000 / per_s <= one <= ms for one in seen) for ms in times), "none is left out for nothing"


def test_a_clock_that_is_put_back_does_not_end_the_looking() -> None:
    sampler = StepSampler(4)
    assert [sampler.is_due(now_ns) for now_ns in (10**18, 10**18 + 1, 10**17, 10**17 + 1)] == [True, False, True, False]


@given(num_steps=st.integers(0, 400))
def test_a_long_request_keeps_some_of_its_steps_spread_over_its_time(num_steps: int) -> None:
    collection = StepCollection()
    step = StepNote(bytes(16), 0, 1, 2, None, 1, 0, 0, 0, 1, 0, 1, 2, {"standard": 1})
    for number in range(num_steps):
        collection.add(encode_step(msgspec.structs.replace(step, number=number)))
    if not num_steps:
        assert collection.packed() == b""
        return
    notes = decode_notes(collection.packed())
    numbers = [one.number for one in notes.steps]
    assert notes.num_seen == num_steps
    assert numbers[0] == 0 and len(numbers) <= MAX_STEPS
    gaps = {after - before for before, after in itertools.pairwise(numbers)}
    assert len(gaps) <= 1, "evenly"
    assert num_steps - numbers[-1] <= max(gaps, default=1)

"""Bytes of experts that requests are charged for: the books are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.config import EngineConfig, Offload, OffloadConfig, Overlap
from moiety_engine.expert_meter import divide_bytes
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreFinish, CoreSubmit
from moiety_engine.moe.load_watch import TAKE_S
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import Batching
from moiety_wire.experts import ExpertLoadQuery, unpack_counts
from moiety_wire.messages import FinishReason, Sampling


class Clock:
    """A clock that a test moves, in seconds."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> int:
        return int(self.now_s * 1e9)


def submit(key: int, tenant: str, num_prompt: int, output: int = 6) -> CoreSubmit:
    prompt = [(key * 31 + i * 7) % 300 + 1 for i in range(num_prompt)]
    return CoreSubmit(key, tenant, STANDARD, prompt, Sampling(temperature=0.0), output, 0, [], output, b"s", 0)


def finishes(results: Any) -> list[CoreFinish]:
    found = [result.finish for result in results.values()]
    assert all(finish is not None for finish in found)
    return found


def active_bytes(loop: EngineLoop, clock: Clock) -> int:
    """Return active experts times their bytes, from the load history."""
    clock.now_s += TAKE_S
    for _ in range(3):
        loop.step()
    load = loop.expert_load(ExpertLoadQuery(1, 0))
    return load.expert_bytes * sum(sum(unpack_counts(minute.active_L)) for minute in load.intervals)


@pytest.mark.parametrize("strategy", [Batching.CONTINUOUS, Batching.PADDED])
@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.ON])
def test_the_bytes_of_all_requests_are_the_bytes_of_all_active_experts(
    loops: Any, strategy: Batching, overlap: Overlap
) -> None:
    clock = Clock()
    config = EngineConfig(
        model=str(loops.folder),
        name="tiny",
        batching=strategy,
        overlap=overlap,
        static_batch_size=4,
        max_batch_tokens=24,
    )
    loop = build_loop(loops.model, config, clock_ns=clock)
    loop.warm_up()
    sizes = [5, 40, 9, 3]  # the second prompt takes two steps beside decodes
    ended = finishes(run_all(loop, [submit(key, f"t{key % 2}", size) for key, size in enumerate(sizes)]))
    charged, meter = sum(finish.expert_read_bytes for finish in ended), loop.experts.meter
    assert all(finish.expert_read_bytes > 0 for finish in ended)
    assert charged == meter.charged_read_bytes_total
    assert meter.read_bytes_total == active_bytes(loop, clock)
    load = loop.load()
    assert (load.expert_read_bytes_total, load.charged_expert_read_bytes_total) == (meter.read_bytes_total, charged)
    assert sum(finish.expert_moved_bytes for finish in ended) == load.charged_expert_moved_bytes_total == 0
    if overlap is Overlap.OFF and strategy is Batching.CONTINUOUS:
        assert charged == meter.read_bytes_total, "no step has tokens past an end"


def test_a_request_alone_pays_for_all_that_it_reads_and_two_equal_ones_half_each(loops: Any) -> None:
    config = EngineConfig(model=str(loops.folder), name="tiny", prefix_caching=False, overlap=Overlap.OFF)
    alone = finishes(run_all(build_loop(loops.model, config), [submit(0, "a", 8)]))[0].expert_read_bytes
    twins = [submit(0, "a", 8), CoreSubmit(1, "b", STANDARD, submit(0, "a", 8).prompt_ids, *_rest())]
    both = [one.expert_read_bytes for one in finishes(run_all(build_loop(loops.model, config), twins))]
    assert sum(both) == alone
    assert abs(both[0] - both[1]) < alone / 1000  # remainders


def _rest() -> tuple[Any, ...]:
    return Sampling(temperature=0.0), 6, 0, [], 6, b"s", 0


def test_an_aborted_request_reports_what_it_has_read_so_far(loops: Any) -> None:
    config = EngineConfig(model=str(loops.folder), name="tiny", overlap=Overlap.ON)
    loop = build_loop(loops.model, config)
    for key in (0, 1):
        loop.submit(submit(key, "a", 8, 50))
    for _ in range(4):
        loop.step()
    loop.abort(0, FinishReason.ABORT)
    ended: list[CoreFinish] = []
    while len(ended) < 2:
        loop.step()
        step = loop.take_outputs()
        ended += [output.finish for output in (step.outputs if step is not None else []) if output.finish is not None]
    meter = loop.experts.meter
    assert 0 < sum(finish.expert_read_bytes for finish in ended) == meter.charged_read_bytes_total
    assert meter.charged_read_bytes_total < meter.read_bytes_total, "a step with the aborted request was running"


def test_loads_of_offloaded_experts_are_charged_to_those_who_needed_them(checkpoint: Path, tmp_path: Path) -> None:
    num_bytes = 2 * 2 * 3 * 64 * 32 * 4  # two of eight in each of two layers
    offload = OffloadConfig(what=Offload.EXPERTS, memory_bytes=num_bytes, folder=str(tmp_path))
    config = EngineConfig(model=str(checkpoint), name="t", device="cpu", dtype="float32", offload=offload)
    with load_loop(config) as loop:
        at_start = loop.load().expert_loaded_bytes_total
        ended = finishes(run_all(loop, [submit(key, f"t{key}", 3 + key, 5) for key in range(4)]))
        load = loop.load()
    moved = [finish.expert_moved_bytes for finish in ended]
    assert min(moved) > 0
    assert sum(moved) == load.charged_expert_moved_bytes_total == load.expert_loaded_bytes_total - at_start


def test_a_second_loop_of_the_same_model_with_larger_steps_counts_as_the_first(loops: Any) -> None:
    """Recorded steps hold the addresses of the counts, which a larger loop replaces."""
    read = []
    for size in (512, 4096, 512):
        config = EngineConfig(
            model=str(loops.folder), name="tiny", max_batch_tokens=size, prefix_caching=False, overlap=Overlap.OFF
        )
        loop = build_loop(loops.model, config)
        ended = finishes(run_all(loop, [submit(key, "a", 5, 20) for key in range(3)]))
        read.append([finish.expert_read_bytes for finish in ended])
        assert sum(read[-1]) == loop.experts.meter.read_bytes_total
    assert read[0] == read[1] == read[2]


def test_the_experts_of_a_requests_newest_token_predict_its_next_ones(loops: Any) -> None:
    config = EngineConfig(model=str(loops.folder), name="tiny", expert_batching=True, overlap=Overlap.OFF)
    loop = build_loop(loops.model, config)
    for key in (0, 1):
        loop.submit(submit(key, "a", 5 + key, 30))
    loop.step()
    shape = loop.executor.model.experts
    assert shape is not None
    for _ in range(12):
        loop.step()
        before = [one.experts.predicted for one in loop.scheduler.queues.by_key.values()]
        assert [one.bit_count() for one in before] == [len(shape.layers) * shape.top_k] * 2
    alone = build_loop(loops.model, config)
    alone.submit(submit(1, "a", 6, 30))
    for _ in range(13):
        alone.step()
    assert alone.scheduler.queues.by_key[1].experts.predicted == before[1], "what else is in the batch does not matter"


@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**12), min_size=1, max_size=9).filter(any))
def test_divided_bytes_add_up_and_follow_the_weights(num_bytes: int, weights: list[int]) -> None:
    parts = divide_bytes(num_bytes, weights)
    assert sum(parts) == num_bytes
    largest = max(range(len(weights)), key=weights.__getitem__)
    for place, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        exact = num_bytes * weight // sum(weights)
        assert exact <= part <= exact + (len(weights) if place == largest else 0)

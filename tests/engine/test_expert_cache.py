"""The expert cache keeps frequent experts, and never evicts an expert that the current step needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.config import EngineConfig, ExpertEviction, Offload, OffloadConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.offload.file import ExpertFile
from moiety_engine.offload.layer import ExpertCacheCounters, LayerExperts
from moiety_engine.offload.loaders import FileExpertLoader
from moiety_engine.offload.slot_table import ExpertSlotTable
from moiety_engine.startup import load_loop
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

NUM_EXPERTS = 12
KEPT = [ExpertEviction.FREQUENCY, ExpertEviction.LRU]


def array(*expert_ids: int) -> Any:
    return np.array(expert_ids, dtype=np.int64)


@given(
    slots=st.integers(1, NUM_EXPERTS),
    eviction=st.sampled_from(KEPT),
    passes=st.lists(st.sets(st.integers(0, NUM_EXPERTS - 1), min_size=1), max_size=20),
)
def test_a_slot_has_one_expert_and_what_is_kept_makes_no_room(
    slots: int, eviction: ExpertEviction, passes: list[set[int]]
) -> None:
    slot_table = ExpertSlotTable(NUM_EXPERTS, slots, eviction)
    for wanted in passes:
        slot_table.visited(array(*sorted(wanted)))
        there = {expert for expert in wanted if slot_table.slot_E[expert] >= 0}
        missing = sorted(wanted - there)
        for expert, slot in zip(missing, slot_table.victims(len(missing), wanted), strict=False):
            slot_table.put(expert, slot)
        assert all(slot_table.slot_E[expert] >= 0 for expert in there)
        assert sum(slot_table.slot_E[list(wanted)] >= 0) >= min(slots, len(wanted))
        for slot, expert in enumerate(slot_table.expert_S):
            assert expert < 0 or slot_table.slot_E[expert] == slot
        assert sum(slot_table.slot_E >= 0) == sum(slot_table.expert_S >= 0)


@pytest.mark.parametrize(("eviction", "stays"), [(ExpertEviction.FREQUENCY, True), (ExpertEviction.LRU, False)])
def test_by_frequency_a_hot_expert_outlasts_some_that_come_once(eviction: ExpertEviction, stays: bool) -> None:
    slot_table = ExpertSlotTable(NUM_EXPERTS, 3, eviction)
    for expert in [0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 4]:
        slot_table.visited(array(expert))
        if slot_table.slot_E[expert] < 0:
            slot_table.put(expert, slot_table.victims(1, [expert])[0])
    assert bool(slot_table.slot_E[0] >= 0 and slot_table.slot_E[1] >= 0) is stays


def test_formerly_hot_experts_are_evicted_for_hot_ones() -> None:
    slot_table = ExpertSlotTable(NUM_EXPERTS, 1, ExpertEviction.FREQUENCY)
    slot_table.put(0, 0)
    for _ in range(100):
        slot_table.visited(array(0))
    for _ in range(100):
        slot_table.visited(array(1))
    slot_table.put(1, 0)
    assert slot_table._worth_E[1] > slot_table._worth_E[0]


class CachedExperts:
    """A layer of experts in a file, each of one number, its own; and slots for some of them."""

    def __init__(self, folder: Path, num_slots: int, eviction: ExpertEviction = ExpertEviction.FREQUENCY) -> None:
        self.file = ExpertFile(folder, "cached")
        every = self.file.empty((NUM_EXPERTS, 8), torch.float32)
        every.copy_(torch.arange(NUM_EXPERTS).unsqueeze(1).expand(-1, 8))
        self.file.finish([{"number": every}])
        self.slots = torch.full((num_slots, 8), float("nan"))
        self.mover = FileExpertLoader(self.file, [[self.slots]])
        self.traffic = ExpertCacheCounters()
        self.layer = LayerExperts(0, ExpertSlotTable(NUM_EXPERTS, num_slots, eviction), self.mover, 32, self.traffic)

    def compute(self, *expert_ids: int) -> tuple[list[int], int]:
        """Return the numbers that a step with these experts reads from slots, each once, and the number of stages."""
        chosen_TK = np.array([expert_ids], dtype=np.int32)
        self.layer.begin(chosen_TK)
        slot_TK = self.layer.slots_if_there()
        stages = 0
        found = torch.full((len(expert_ids),), -1.0)
        for slots in self.layer.stages() if slot_TK is None else [slot_TK]:
            stages += 1
            there = slots[0] >= 0
            assert bool((found[there] == -1).all()), "an expert had its turn twice"
            found[there] = self.slots[slots[0][there].long()].amin(1)
        self.layer.end()
        return found.int().tolist(), stages

    def close(self) -> None:
        self.mover.close()
        self.file.close()


@pytest.fixture
def make_cached(tmp_path: Path) -> Any:
    shelves: list[CachedExperts] = []

    def make(num_slots: int, **more: Any) -> CachedExperts:
        shelves.append(CachedExperts(tmp_path, num_slots, **more))
        return shelves[-1]

    yield make
    for cached in shelves:
        cached.close()


@pytest.mark.parametrize("num_slots", [1, 2, 5, NUM_EXPERTS])
def test_a_pass_reads_each_of_its_experts_whatever_there_is_room_for(make_cached: Any, num_slots: int) -> None:
    cached, rng = make_cached(num_slots), np.random.default_rng(num_slots)
    cached.layer.fill()
    for _ in range(60):
        wanted = rng.permutation(NUM_EXPERTS)[: rng.integers(1, NUM_EXPERTS + 1)].tolist()
        if rng.random() < 0.5:
            cached.layer.expect(rng.permutation(NUM_EXPERTS)[:3].astype(np.int32))
        found, _ = cached.compute(*wanted)
        assert found == wanted
    traffic = cached.traffic
    assert traffic.hits_total + traffic.misses_total > 60
    assert (traffic.misses_total == 0) is (num_slots == NUM_EXPERTS)


def test_all_experts_pass_through_few_slots_and_the_hot_ones_stay(make_cached: Any) -> None:
    cached = make_cached(4)
    for _ in range(5):
        cached.compute(3, 7)
    assert cached.compute(*range(NUM_EXPERTS))[0] == list(range(NUM_EXPERTS))
    misses = cached.traffic.misses_total
    assert cached.compute(3, 7) == ([3, 7], 1)
    assert cached.traffic.misses_total == misses


def test_cached_experts_are_computed_before_missing_ones(make_cached: Any) -> None:
    cached = make_cached(4)
    cached.compute(1, 2)
    cached.layer.begin(np.array([[1, 2, 5]], dtype=np.int32))
    first, second = (stage.tolist() for stage in cached.layer.stages())
    assert [slot >= 0 for slot in first[0]] == [True, True, False]
    assert [slot >= 0 for slot in second[0]] == [False, False, True]


def prefetch_and_compute(cached: CachedExperts, told: list[int], wanted: list[int]) -> None:
    cached.layer.expect(np.array([told], dtype=np.int32))
    assert cached.compute(*wanted)[0] == wanted


def test_guesses_are_followed_once_they_have_come_true_and_no_longer_than_that(make_cached: Any) -> None:
    cached = make_cached(3)
    traffic = cached.traffic
    for number in range(8):
        prefetch_and_compute(cached, [number % 12], [number % 12])
    assert (traffic.prefetched_total, traffic.misses_total) == (0, 8)
    for number in range(8, 20):
        prefetch_and_compute(cached, [number % 12], [number % 12])
    assert traffic.prefetched_total == traffic.prefetch_hits_total == traffic.hits_total > 8
    for number in range(60):
        prefetch_and_compute(cached, [number % 6], [6 + number % 6])
    wrong = traffic.prefetched_total
    for number in range(10):
        prefetch_and_compute(cached, [number % 6], [6 + number % 6])
    assert traffic.prefetched_total == wrong


def test_a_cache_without_slots_loads_all_experts_in_each_pass(make_cached: Any) -> None:
    cached = make_cached(6, eviction=ExpertEviction.ALL)
    for _ in range(3):
        assert cached.compute(1, 2)[0] == [1, 2]
    assert (cached.traffic.hits_total, cached.traffic.misses_total) == (0, 6)
    assert cached.traffic.loaded_bytes_total == 6 * 32


# ── in an engine ──


def make_submit(key: int) -> CoreSubmit:
    prompt = [3 + (key * 31 + i * 7) % 300 for i in range(9 + 5 * key)]
    sampling = Sampling(temperature=0.9 if key % 2 else 0.0, seed=key)
    return CoreSubmit(key, "t", STANDARD, prompt, sampling, 12, 0, [], 12, b"s", 0)


def answers(loop: EngineLoop) -> dict[int, list[int]]:
    return {key: result.token_ids for key, result in run_all(loop, map(make_submit, range(6))).items()}


def config_of(checkpoint: Path, **more: Any) -> EngineConfig:
    return EngineConfig(model=str(checkpoint), name="t", device="cpu", dtype="float32", **more)


def test_an_engine_with_a_quarter_of_its_experts_answers_as_one_with_all_asleep_in_between_and_counts(
    checkpoint: Path, tmp_path: Path
) -> None:
    small: dict[str, Any] = {
        "max_batch_tokens": 16,
        "max_running": 3,
        "kv_memory_bytes": 60_000,
        "block_size": 4,
    }  # preempts
    plain = load_loop(config_of(checkpoint, **small))
    expected = answers(plain)
    num_bytes = 2 * 2 * 3 * 64 * 32 * 4  # two of eight in each of two layers
    offload = OffloadConfig(what=Offload.EXPERTS, memory_bytes=num_bytes, folder=str(tmp_path))
    with load_loop(config_of(checkpoint, offload=offload, **small)) as loop:
        loop.warm_up()
        assert answers(loop) == expected
        load = loop.load()
        assert load.expert_slots == 4
        assert load.expert_hits_total > 0
        assert load.expert_misses_total > 0
        one = num_bytes // load.expert_slots
        assert load.expert_loaded_bytes_total % one == 0
        assert (
            load.expert_loaded_bytes_total
            <= (load.expert_misses_total + load.prefetched_experts_total + load.expert_slots) * one
        )
        loop.sleep()
        loop.wake()
        assert answers(loop) == expected
    assert plain.load().expert_slots == plain.load().expert_misses_total == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tp": 2, "ep": 2, "redundant_experts": 2}, "leave out --rebalance-every-s"),
        ({"adapter_memory_bytes": 1 << 20}, "leave out --adapter"),
        ({"offload": OffloadConfig(memory_bytes=1 << 20)}, "need --offload experts"),
        ({"offload": OffloadConfig(what=Offload.EXPERTS, memory_bytes=0)}, "at least 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        EngineConfig(**({"model": "m", "name": "m", "offload": OffloadConfig(what=Offload.EXPERTS)} | settings))


def test_an_offloading_engine_serves_no_adapters(checkpoint: Path, tmp_path: Path) -> None:
    offload = OffloadConfig(what=Offload.EXPERTS, folder=str(tmp_path))
    with load_loop(config_of(checkpoint, offload=offload)) as loop:
        assert loop.executor.sizes.adapter_bytes == 0

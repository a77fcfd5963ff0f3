"""Expert ranks that are added and removed while the engine serves, in real processes on gloo."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from moiety_engine.adapters.dummy import ATTENTION, write_adapter
from moiety_engine.distribution.collectives import Ranks
from moiety_engine.distribution.layout import Layout, RankPosition, expert_part, with_expert_ranks
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.expert_migration import with_experts
from moiety_engine.model.loading import load_share
from moiety_engine.model.weight_offload import named_tensors
from moiety_engine.model.weights import ModelWeights

from .rank_processes import Alone, RankProcesses, assert_same, ranks_of, requests, settings_of, thorough

MOVING: dict[str, Any] = {"redundant_experts": 2, "rebalance_every_s": 0.2}
SCALED = [  # numbers of expert ranks, one after the other
    ("qwen3_moe", {"ffn_ranks": 2, "ep": 2, "redundant_experts": 2}, [3, 1, 2]),
    thorough("mixtral", {"dp_attention": 2, "ffn_ranks": 1, "micro_batch_tokens": 2}, [2]),
    thorough("gpt_oss", {"tp": 2, "ffn_ranks": 2, "ep": 2}, [1]),
    thorough("qwen3_moe", {"pp": 2, "ffn_ranks": 1}, [2, 1]),
    ("qwen3_moe", {"dp_attention": 2, "ep": 2, **MOVING, "expert_rank_weights": "8,1"}, [2, 3, 0]),
    thorough("deepseek_v3", {"dp_attention": 2, "tp": 2, "ep": 2}, [1, 0, 2]),
    thorough("gpt_oss", {"tp": 2}, [2, 0]),
    thorough("mixtral", {"tp": 2, "ep": 2}, [2, 0]),
    thorough("qwen3_moe", {"tp": 4, "ep": 2, "decode_context_parallel": 2}, [1, 0]),
    thorough("mixtral", {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "micro_batch_tokens": 2}, [0, 1]),
    thorough("qwen3_next", {"dp_attention": 2, "two_batch_overlap": "on"}, [2, 0]),
    ("qwen3_moe", {"pp": 2, "pp_microbatches": 1}, [2, 0, 1]),
    thorough("mixtral", {"pp": 2, "dp_attention": 2, "ep": 2, "pp_microbatches": 1, **MOVING}, [1, 0, 2]),
    thorough("qwen3_moe", {"pp": 2, "ffn_ranks": 2, "ep": 2}, [0, 1]),
    thorough("qwen3_moe", {"prefill_context_parallel": 2, "ep": 2}, [1, 0, 2]),
    thorough("deepseek_v3", {"prefill_context_parallel": 2, "tp": 2, "ffn_ranks": 1}, [2, 0]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "numbers"), SCALED, ids=str)
def test_answers_are_the_same_while_expert_ranks_are_added_and_removed(
    processes: RankProcesses, alone: Alone, family: str, layout: dict[str, Any], numbers: list[int]
) -> None:
    config = settings_of(alone.folders[family], **layout)
    (ours,) = processes.work((config, None), waves=requests(), again=True, scales=numbers)
    assert_same(alone.says(family), ours)
    assert ours["scaling_problems"] == [""] * len(numbers)
    assert ours["expert_ranks"] == numbers
    assert ours["moves"]["switch_s"] > 0


@pytest.mark.slow
def test_a_new_rank_that_does_not_join_leaves_the_ranks_of_before(processes: RankProcesses, alone: Alone) -> None:
    config = settings_of(alone.folders["qwen3_moe"], ffn_ranks=1)
    work = {"waves": requests(), "again": True, "scales": [2], "lacks": "new ranks"}
    (ours,) = processes.work((config, None), **work)
    assert_same(alone.says("qwen3_moe"), ours)
    (problem,) = ours["scaling_problems"]
    assert "rank 2 ended with exit code" in problem
    assert ours["expert_ranks"] == [1]


@pytest.mark.slow
def test_ranks_go_on_and_change_their_number_again_after_a_new_rank_was_killed_while_groups_were_created(
    processes: RankProcesses, alone: Alone
) -> None:
    config = settings_of(alone.folders["qwen3_moe"], ffn_ranks=1)
    work = {"waves": requests(), "again": True, "scales": [2, 3], "lacks": "groups"}
    (ours,) = processes.work((config, None), **work)
    assert_same(alone.says("qwen3_moe"), ours)
    problem, none = ours["scaling_problems"]
    assert "rank 2 ended with exit code -9" in problem and not none
    assert ours["expert_ranks"] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "number"),
    [
        ({"dp_attention": 2, "ep": 2}, 1),
        thorough({"ffn_ranks": 1}, 2),
        thorough({"dp_attention": 2, "ffn_ranks": 1}, 0),
    ],
    ids=str,
)
def test_an_adapter_that_is_arranged_while_expert_ranks_change_is_read_again_and_served(
    processes: RankProcesses, alone: Alone, tmp_path: Path, layout: dict[str, Any], number: int
) -> None:
    folder = alone.folders["qwen3_moe"]
    modules = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
    given = {"one": str(write_adapter(tmp_path / "one", folder, modules=modules, rank=6, seed=2))}
    waves = [[msgspec.structs.replace(one, adapter="one" if one.key % 2 else "") for one in requests()[0]]]
    (expected,) = processes.work(*ranks_of(settings_of(folder, adapters=given)), waves=waves)
    memory = {"adapter_memory_bytes": 1 << 24, "max_adapters": 2}
    config, work = settings_of(folder, **memory, **layout), {"adapters": given, "arranges": True}
    (ours,) = processes.work((config, None), waves=waves, some_fail=True, scales=[number], **work)
    assert_same(expected, ours)
    assert ours["scaling_problems"] == [""] and ours["expert_ranks"] == [number]
    assert ours["num_slots"] == 1 and not ours["reasons"]


REFUSED = [
    ({"pp": 2}, 2, "2 steps in the stages of --pp 2 at once: start it with --pp-microbatches 1"),
    ({"ffn_ranks": 2}, 3, "--ep 1 divides each expert among several of the 2 expert ranks"),
    ({"ffn_ranks": 2, "ep": 2}, 0, "at least one expert rank must be left"),
    ({"ffn_ranks": 2, "ep": 2}, 99, "more than the model's experts"),
    ({"ffn_ranks": 2, "ep": 2}, 1, "started by a launcher"),
    thorough({"ffn_ranks": 2, "ep": 2, "batch_invariant": True}, 1, "--batch-invariant"),
]


@pytest.mark.parametrize(("layout", "number", "words"), REFUSED, ids=str)
def test_a_number_of_expert_ranks_that_is_not_feasible_is_refused_with_the_reason(
    processes: RankProcesses, alone: Alone, layout: dict[str, Any], number: int, words: str
) -> None:
    config = settings_of(alone.folders["qwen3_moe"], **layout)
    ours, *_ = processes.work(*ranks_of(config), waves=requests()[:1], again=True, scales=[number])
    (problem,) = ours["scaling_problems"]
    assert words in problem
    assert ours["expert_ranks"] == [layout.get("ffn_ranks", 0)]


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("num_redundant", [0, 2])
def test_each_number_of_ranks_holds_all_experts_in_slots_of_the_same_number(num_ranks: int, num_redundant: int) -> None:
    layout = with_expert_ranks(Layout(ffn_ranks=2, ep=2, redundant_experts=num_redundant), num_ranks)
    slots = layout.slots(8)
    assert set(slots) == set(range(8))
    assert len(slots) % num_ranks == 0 and layout.num_ranks == 1 + num_ranks
    if num_ranks > 1:
        assert len(slots) >= 8 + num_redundant
    each = len(slots) // num_ranks
    for rank in range(num_ranks):
        held = slots[rank * each : (rank + 1) * each]
        assert len(set(held)) == len(held), "no rank holds an expert twice"
    assert with_expert_ranks(with_expert_ranks(layout, 5), num_ranks) == layout


def test_a_single_rank_cannot_get_expert_ranks() -> None:
    with pytest.raises(InvalidConfig, match="start the engine with --ffn-ranks"):
        with_expert_ranks(Layout(), 1)


def test_ranks_of_a_stage_load_the_experts_of_its_layers_only() -> None:
    layout = with_expert_ranks(with_expert_ranks(Layout(dp=2, pp=2, ep=2), 3), 0)
    for rank in range(4):
        position = RankPosition(layout, rank)
        part = expert_part(position)
        assert part.expert_rank == rank % 2
        assert part.slots_of(8) == position.slots_of(8)
        assert part.layers_of(5) == position.layers_of(5)


@pytest.mark.parametrize("num_redundant", [0, 2])
def test_ranks_with_attention_have_the_experts_that_loading_as_expert_ranks_gives_them(num_redundant: int) -> None:
    before = Layout(dp=2, tp=2, ep=4, redundant_experts=4 * (num_redundant > 0))
    assert with_expert_ranks(before, 3).num_ranks == 7
    layout = with_expert_ranks(with_expert_ranks(before, 3), 0)
    assert (layout.ffn_ranks, layout.ep, layout.num_ranks) == (0, 4, 4)
    for rank in range(4):
        position = RankPosition(layout, rank)
        part = expert_part(position)
        assert part.expert_rank == rank
        assert part.slots_of(8) == position.slots_of(8)
    assert with_expert_ranks(layout, 3) == with_expert_ranks(before, 3)


def test_a_rank_with_attention_frees_its_experts_and_loads_the_same_ones_without_its_other_weights(
    alone: Alone,
) -> None:
    layout = with_expert_ranks(with_expert_ranks(Layout(dp=2, ep=2), 3), 0)

    def load(position: RankPosition) -> ModelWeights:
        return load_share(alone.folders["gpt_oss"], device="cpu", dtype="float32", ranks=Ranks(position)).weights

    whole, experts = load(RankPosition(layout, 1)), load(expert_part(RankPosition(layout, 1)))
    without = with_experts(whole, None)
    num_bytes = {name: tensor.nbytes for name, tensor in named_tensors(without) if ".ffn." in name}
    assert set(num_bytes) >= {"layers.ffn.gate_up_E2FD", "layers.ffn.down_EDF"}
    assert not num_bytes["layers.ffn.gate_up_E2FD"] and not num_bytes["layers.ffn.down_EDF"]
    again = with_experts(without, experts)
    for (name, before), (same, after) in zip(named_tensors(whole), named_tensors(again), strict=True):
        assert name == same and torch.equal(before, after)
    assert sum(one.nbytes for _, one in named_tensors(experts)) < sum(one.nbytes for _, one in named_tensors(whole))


def test_a_model_whose_experts_move_to_expert_ranks_keeps_no_reference_to_them(alone: Alone) -> None:
    ranks = Ranks(RankPosition(Layout(tp=2, ep=2), 0))
    model = load_share(alone.folders["qwen3_moe"], device="cpu", dtype="float32", ranks=ranks).transformer()
    held = [weakref.ref(one) for name, one in named_tensors(model._weights) if name.endswith(("up_E2FD", "down_EDF"))]
    assert held and all(one() is not None for one in held)
    ranks.rank_position = RankPosition(with_expert_ranks(ranks.rank_position.layout, 1), 0)
    ranks.crossings = (cast(Any, SimpleNamespace(there=SimpleNamespace(size=3), back=None, num_attention=2)),)
    model.settle(60)  # until then a thread has the weights
    model.use_expert_ranks(ranks.rank_position)
    model.settle(60)
    gc.collect()
    assert not [one for one in held if one() is not None]

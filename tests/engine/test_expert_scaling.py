"""Expert ranks that are added and removed while the engine serves, in real processes on gloo."""

from __future__ import annotations

from typing import Any

import pytest

from moiety_engine.distribution.layout import Layout, with_expert_ranks
from moiety_engine.errors import InvalidConfig

from .rank_processes import Alone, RankProcesses, assert_same, ranks_of, requests, settings_of, thorough

SCALED = [  # numbers of expert ranks, one after the other
    ("qwen3_moe", {"ffn_ranks": 2, "ep": 2, "redundant_experts": 2}, [3, 1, 2]),
    thorough("mixtral", {"dp_attention": 2, "ffn_ranks": 1, "micro_batch_tokens": 2}, [2]),
    thorough("gpt_oss", {"tp": 2, "ffn_ranks": 2, "ep": 2}, [1]),
    thorough("qwen3_moe", {"pp": 2, "ffn_ranks": 1}, [2, 1]),
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


REFUSED = [
    ({"tp": 2, "ep": 2}, 3, "use --ffn-ranks"),
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


def test_a_layout_without_ranks_for_experts_cannot_be_scaled() -> None:
    with pytest.raises(InvalidConfig, match="use --ffn-ranks"):
        with_expert_ranks(Layout(dp=2, ep=2), 3)

"""The choice of replicas in a step: all tokens get one, ranks are balanced, and ranks that choose apart agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_placement.errors import BadLoad
from moiety_placement.placement_planner import plan
from moiety_placement.placement_table import Ints, Placement, rank_loads
from moiety_placement.replicas import concentrate, distribute, spread
from moiety_placement.survival import without

EXPERTS, RANKS, REPLICAS, SLOTS = 16, 4, 24, 6
seeds = st.integers(0, 1 << 32)


def draw_placement(seed: int, num_layers: int = 2) -> Placement:
    load_LE = np.random.default_rng(seed).pareto(1.0, (num_layers, EXPERTS)) + 0.01
    return plan(load_LE, num_replicas=REPLICAS, num_groups=1, num_nodes=1, num_ranks=RANKS)


def draw_tokens(seed: int, num_tokens: int) -> Ints:
    """[T, K]"""
    rng = np.random.default_rng(seed)
    weights = rng.pareto(1.0, EXPERTS) + 0.01
    return np.argsort(-(rng.random((num_tokens, EXPERTS)) ** (1 / weights)), axis=1)[:, :4]


def count(expert_TK: Ints) -> Ints:
    return np.bincount(expert_TK.ravel(), minlength=EXPERTS)


def by_rank(quota_LR: Ints) -> Ints:
    return np.asarray(quota_LR.reshape(len(quota_LR), RANKS, SLOTS).sum(axis=2))


@settings(max_examples=30, deadline=None)
@given(seeds, seeds, st.integers(0, 300), st.sampled_from([spread, concentrate]))
def test_every_token_gets_a_replica_of_its_expert(
    seed: int, tokens: int, num_tokens: int, choose: Callable[[Placement, Ints], Ints]
) -> None:
    placement, expert_TK = draw_placement(seed), draw_tokens(tokens, num_tokens)
    quota_LR = choose(placement, np.stack([count(expert_TK)] * 2))
    assert quota_LR.min() >= 0
    for layer, quota_R in enumerate(quota_LR):
        slot_TK = distribute(placement, layer, expert_TK, quota_R)
        assert placement.physical_to_logical_LR[layer][slot_TK].tolist() == expert_TK.tolist()
        assert np.bincount(slot_TK.ravel(), minlength=REPLICAS).tolist() == quota_R.tolist()


@settings(max_examples=30, deadline=None)
@given(seeds, seeds, st.integers(0, 2000))
def test_spread_tokens_are_no_less_even_than_an_even_split(seed: int, tokens: int, num_tokens: int) -> None:
    placement = draw_placement(seed)
    counts_LE = np.stack([count(draw_tokens(tokens, num_tokens))] * 2)
    distinct = [[set(ranks // SLOTS) - {-1} for ranks in layer] for layer in placement.logical_to_physical_LEC]
    even_LG = np.zeros((2, RANKS))
    for layer, expert in np.ndindex(2, EXPERTS):
        for rank in distinct[layer][expert]:
            even_LG[layer, rank] += counts_LE[layer, expert] / len(distinct[layer][expert])
    assert (by_rank(spread(placement, counts_LE)).max(axis=1) <= even_LG.max(axis=1) + SLOTS).all()


def test_spreading_fills_the_rank_that_has_less_of_its_own() -> None:
    placement = Placement.of([[0, 1, 0, 2, 0, 3]], num_experts=4, num_ranks=3)
    assert spread(placement, [[30, 40, 10, 10]]).tolist() == [[0, 40, 15, 10, 15, 10]]
    assert rank_loads(placement, [[30, 40, 10, 10]]).tolist() == [[50, 20, 20]]


@settings(max_examples=30, deadline=None)
@given(seeds, st.lists(st.integers(0, 5), min_size=6, max_size=6))
def test_concentrated_tokens_wake_each_expert_once_and_ranks_within_one_of_the_best_choice(
    seed: int, counts: list[int]
) -> None:
    load_LE = np.random.default_rng(seed).pareto(1.0, (1, 6)) + 0.01
    placement = plan(load_LE, num_replicas=12, num_groups=1, num_nodes=1, num_ranks=3)
    active_G = (concentrate(placement, [counts]).reshape(3, 4) > 0).sum(axis=1)
    assert active_G.sum() == sum(tokens > 0 for tokens in counts)
    choices = [
        {int(slot) // 4 for slot in placement.logical_to_physical_LEC[0, expert] if slot >= 0}
        for expert in range(6)
        if counts[expert]
    ]
    best = min(max(Counter(ranks).values(), default=0) for ranks in product(*choices))
    assert active_G.max() <= best + 1


def test_active_experts_are_balanced_over_ranks_where_an_even_split_wakes_every_replica() -> None:
    placement = Placement.of([[0, 1, 2, 0, 1, 2]], num_experts=3, num_ranks=2)
    quota_LR = concentrate(placement, [[9, 4, 4]])
    assert sorted((quota_LR.reshape(2, 3) > 0).sum(axis=1).tolist()) == [1, 2]
    assert sorted(quota_LR.reshape(2, 3).sum(axis=1).tolist()) == [8, 9]


@settings(max_examples=30, deadline=None)
@given(seeds, seeds, st.integers(2, 100))
def test_ranks_that_deal_their_own_tokens_together_keep_the_quota(seed: int, tokens: int, num_tokens: int) -> None:
    placement, expert_TK = draw_placement(seed, num_layers=1), draw_tokens(tokens, num_tokens)
    quota_R = spread(placement, count(expert_TK)[None])[0]
    mine, theirs = expert_TK[: num_tokens // 2], expert_TK[num_tokens // 2 :]
    apart = [distribute(placement, 0, mine, quota_R), distribute(placement, 0, theirs, quota_R, count(mine))]
    assert np.concatenate(apart).tolist() == distribute(placement, 0, expert_TK, quota_R).tolist()


def test_tokens_that_nobody_can_compute_are_refused() -> None:
    placement = Placement.of([[0, 1, 0, 2]], num_experts=3, num_ranks=2)
    quota_R = spread(placement, [[4, 1, 1]])[0]
    with pytest.raises(BadLoad, match="expert 1 has 2 tokens, but its quota is 1"):
        distribute(placement, 0, np.array([[1], [1]]), quota_R)
    with pytest.raises(BadLoad, match="a quota is for 4 slots, and experts are 0 to 2"):
        distribute(placement, 0, np.array([[3]]), quota_R)
    with pytest.raises(BadLoad, match="need expert 1, which has no slot"):
        spread(without(placement, {0}).placement, [[4, 1, 1]])
    with pytest.raises(BadLoad, match="must be integers"):
        concentrate(placement, [[0.5, 1, 1]])

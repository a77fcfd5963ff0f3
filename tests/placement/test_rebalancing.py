"""Changes of placement: which experts move, the gain, and the placement after ranks fail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_placement.errors import BadLoad, BadNumbers, TooFewSlots
from moiety_placement.matching import keep_in_place, moves
from moiety_placement.placement_planner import plan
from moiety_placement.placement_table import Floats, Placement, rank_loads
from moiety_placement.rebalancing import rebalance
from moiety_placement.survival import start_without, without

EXPERTS, GROUPS, NODES, RANKS, REPLICAS = 24, 4, 2, 6, 36
HIERARCHICAL = {"num_replicas": REPLICAS, "num_groups": GROUPS, "num_nodes": NODES, "num_ranks": RANKS}
GLOBAL = HIERARCHICAL | {"num_groups": 1, "num_nodes": 1}
seeds = st.integers(0, 1 << 32)
numbers = st.sampled_from([HIERARCHICAL, GLOBAL])


def draw_load(seed: int, num_layers: int = 3) -> Floats:
    return np.floor(np.random.default_rng(seed).pareto(1.2, (num_layers, EXPERTS)) * 100 + 1)


def largest(placement: Placement, load_LE: Floats) -> Floats:
    return rank_loads(placement, load_LE).max(axis=1)


@settings(max_examples=30, deadline=None)
@given(seeds, seeds, numbers)
def test_renaming_ranks_and_slots_moves_fewer_weights_and_changes_no_load(
    before: int, after: int, how: dict[str, int]
) -> None:
    load_LE = draw_load(after)
    old, new = plan(draw_load(before), **how), plan(load_LE, **how)
    kept = keep_in_place(new, old)
    assert (moves(old, kept) <= moves(old, new)).all()
    assert np.allclose(np.sort(rank_loads(kept, load_LE)), np.sort(rank_loads(new, load_LE)))
    nodes_LNR = np.sort(kept.physical_to_logical_LR.reshape(-1, kept.num_nodes, REPLICAS // kept.num_nodes))
    as_planned_LNR = np.sort(new.physical_to_logical_LR.reshape(nodes_LNR.shape))
    assert {tuple(node) for node in nodes_LNR.reshape(-1, nodes_LNR.shape[2]).tolist()} == {
        tuple(node) for node in as_planned_LNR.reshape(-1, nodes_LNR.shape[2]).tolist()
    }


@settings(max_examples=25, deadline=None)
@given(seeds, st.randoms(use_true_random=False))
def test_a_plan_that_only_has_other_names_moves_nothing(seed: int, random: np.random.Generator) -> None:
    old = plan(draw_load(seed), **GLOBAL)
    ranks_LGS = np.array(old.physical_to_logical_LR).reshape(old.num_layers, RANKS, -1)
    order = list(range(RANKS))
    random.shuffle(order)
    renamed = Placement.of(ranks_LGS[:, order, ::-1].reshape(old.num_layers, -1), num_experts=EXPERTS, num_ranks=RANKS)
    kept = keep_in_place(renamed, old)
    assert moves(old, renamed).sum() > 0
    assert moves(old, kept).tolist() == [0, 0, 0]


@settings(max_examples=30, deadline=None)
@given(seeds, seeds, numbers, st.sampled_from([0.0, 0.01, 0.1]))
def test_rebalancing_gains_at_least_what_its_moves_cost_and_names_the_layers_that_change(
    before: int, after: int, how: dict[str, int], move_cost: float
) -> None:
    old, load_LE = plan(draw_load(before), **how), draw_load(after)
    done = rebalance(old, load_LE, move_cost=move_cost)
    gain_L = (largest(old, load_LE) - largest(done.placement, load_LE)) / rank_loads(old, load_LE).mean(axis=1)
    assert np.allclose(done.gain_L, gain_L)
    assert (gain_L >= move_cost * done.moves_L - 1e-9).all()
    assert done.moves_L.tolist() == moves(old, done.placement).tolist()
    assert sorted(done.order) == np.flatnonzero(done.moves_L).tolist()
    assert done.placement.counts_LE.min() >= 1
    homes = np.sort(np.unique(old.physical_to_logical_LR.reshape(3, old.num_nodes, -1)[0, 0]))
    homes_after = np.sort(np.unique(done.placement.physical_to_logical_LR.reshape(3, old.num_nodes, -1)[0, 0]))
    assert homes.tolist() == homes_after.tolist()


def test_a_shift_of_the_load_is_followed_with_few_moves_and_no_move_where_it_does_not_pay() -> None:
    old, load_LE = plan(draw_load(1), **GLOBAL), draw_load(1)
    load_LE[0, int(load_LE[0].argmin())] = load_LE[0].sum() / 4  # one expert of the first layer becomes hot
    done = rebalance(old, load_LE, move_cost=0.01)
    assert done.order == (0,)
    assert done.moves_L[0] <= 8
    assert largest(old, load_LE)[0] > 1.9 * load_LE[0].sum() / RANKS
    assert largest(done.placement, load_LE)[0] < 1.05 * load_LE[0].sum() / RANKS
    assert rebalance(old, load_LE, move_cost=10).order == ()
    assert rebalance(done.placement, load_LE, move_cost=0.05).order == ()


@settings(max_examples=30, deadline=None)
@given(seeds, numbers, st.sets(st.integers(0, RANKS - 1), max_size=RANKS - 1))
def test_without_dead_ranks_the_rest_stands_and_what_is_lost_is_what_stood_only_there(
    seed: int, how: dict[str, int], dead: set[int]
) -> None:
    placement = plan(draw_load(seed), **how)
    left = without(placement, dead)
    for layer in range(placement.num_layers):
        slots_R, left_R = placement.physical_to_logical_LR[layer], left.placement.physical_to_logical_LR[layer]
        gone_R = np.isin(placement.rank_R, list(dead))
        assert (left_R[gone_R] == -1).all()
        assert (left_R[~gone_R] == slots_R[~gone_R]).all()
        assert set(np.flatnonzero(left.lost_LE[layer]).tolist()) == set(slots_R.tolist()) - set(
            left_R[~gone_R].tolist()
        )


@settings(max_examples=25, deadline=None)
@given(seeds, numbers, st.integers(0, RANKS - 1))
def test_rebalancing_brings_the_lost_experts_back_on_the_ranks_that_live(
    seed: int, how: dict[str, int], dead: int
) -> None:
    load_LE = draw_load(seed)
    left = without(plan(load_LE, **how), {dead})
    done = rebalance(left.placement, load_LE, move_cost=0.01)
    assert done.placement.counts_LE.min() >= 1
    assert rank_loads(done.placement, load_LE).sum() == pytest.approx(load_LE.sum())
    assert rank_loads(done.placement, load_LE)[:, dead].tolist() == [0, 0, 0]
    assert (done.moves_L >= left.lost_LE.sum(axis=1)).all()


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(2, 12), st.integers(1, 40))
def test_a_start_without_dead_ranks_has_every_expert_spread_evenly_over_the_living(
    data: st.DataObject, num_ranks: int, num_experts: int
) -> None:
    dead = data.draw(st.sets(st.integers(0, num_ranks - 1), max_size=num_ranks - 1))
    living = [rank for rank in range(num_ranks) if rank not in dead]
    each = min(num_experts, -(-num_experts // len(living)) + data.draw(st.integers(0, num_experts)))
    slots_R = start_without(dead, num_ranks=num_ranks, num_experts=num_experts, slots_each=each)
    placement = Placement.of([slots_R], num_experts=num_experts, num_ranks=len(living))
    assert placement.counts_LE.min() >= 1
    alike = rank_loads(placement, np.ones((1, num_experts)))
    assert alike.max() <= alike.mean() + 2
    assert all(len(set(own_S.tolist())) == each for own_S in slots_R.reshape(len(living), each))


def test_a_start_without_a_dead_rank_puts_no_expert_twice_on_one_that_lives() -> None:
    slots_R = start_without({3}, num_ranks=4, num_experts=16, slots_each=8)
    assert [len(set(own_S.tolist())) for own_S in slots_R.reshape(3, 8)] == [8, 8, 8]
    with pytest.raises(BadNumbers, match="a rank has 5 slots, more than the 4 experts"):
        start_without({1}, num_ranks=2, num_experts=4, slots_each=5)


def test_placements_without_room_or_with_unknown_ranks_are_refused_with_numbers() -> None:
    placement = plan(draw_load(1), **GLOBAL)
    with pytest.raises(TooFewSlots, match="bring 6 more slots back into service"):
        rebalance(without(placement, {0, 1, 2}).placement, draw_load(1), move_cost=0.01)
    with pytest.raises(BadNumbers, match="ranks are 0 to 5, not 6 to 6"):
        without(placement, {6})
    with pytest.raises(BadNumbers, match="all 6 ranks have failed"):
        without(placement, range(6))
    with pytest.raises(BadNumbers, match="0 or more mean rank loads"):
        rebalance(placement, draw_load(1), move_cost=-1)
    with pytest.raises(BadLoad, match="3 layers × 24 experts, the load"):
        rebalance(placement, draw_load(1, num_layers=2), move_cost=0.01)
    with pytest.raises(BadNumbers, match="different layers, experts, slots or ranks"):
        moves(placement, plan(draw_load(1), **(GLOBAL | {"num_replicas": 42})))

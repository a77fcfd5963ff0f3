"""Plans from loads: what always holds of them, and how near they come to an even load."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_placement.budgets import replica_budgets
from moiety_placement.errors import BadLoad, BadNumbers
from moiety_placement.packing import pack, replicate
from moiety_placement.placement_planner import plan
from moiety_placement.placement_table import Floats, Placement, balancedness, rank_loads


class Case(NamedTuple):
    load_LE: Floats
    numbers: dict[str, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes, ranks_of_node, groups_of_node, group_size = (draw(st.integers(1, high)) for high in (3, 3, 3, 4))
    groups = nodes * groups_of_node if draw(st.booleans()) else 1
    experts = nodes * groups_of_node * group_size
    ranks = nodes * ranks_of_node
    replicas = -(-experts // ranks) * ranks + ranks * draw(st.integers(0, 3))
    skew = draw(st.floats(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    load_LE = np.floor(1000 * rng.random((draw(st.integers(1, 4)), experts)) ** (skew + 0.1))
    return Case(load_LE, {"num_replicas": replicas, "num_groups": groups, "num_nodes": nodes, "num_ranks": ranks})


def zipf(num_layers: int, num_experts: int, exponent: float, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    load_E = np.arange(1, num_experts + 1) ** -exponent
    return np.stack([rng.permutation(load_E / load_E.sum()) for _ in range(num_layers)])


def largest(placement: Placement, load_LE: Floats) -> Floats:
    return rank_loads(placement, load_LE).max(axis=1)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_every_expert_has_a_replica_and_every_slot_an_expert_on_ranks_of_equal_size(case: Case) -> None:
    placement = plan(case.load_LE, **case.numbers)
    slots_LR = placement.physical_to_logical_LR
    assert slots_LR.shape == (len(case.load_LE), case.numbers["num_replicas"])
    assert slots_LR.min() >= 0
    assert placement.counts_LE.min() >= 1
    assert set(np.bincount(placement.rank_R).tolist()) == {slots_LR.shape[1] // placement.num_ranks}
    for layer, expert in np.ndindex(placement.counts_LE.shape):
        listed = placement.logical_to_physical_LEC[layer, expert, : placement.counts_LE[layer, expert]]
        assert listed.tolist() == np.flatnonzero(slots_LR[layer] == expert).tolist()
        assert (placement.logical_to_physical_LEC[layer, expert, placement.counts_LE[layer, expert] :] == -1).all()


@settings(max_examples=30, deadline=None)
@given(cases())
def test_a_group_stays_in_one_node_where_groups_divide_among_nodes(case: Case) -> None:
    numbers = case.numbers
    placement = plan(case.load_LE, **numbers)
    groups_LR = placement.physical_to_logical_LR // (case.load_LE.shape[1] // numbers["num_groups"])
    nodes_R = placement.rank_R // (numbers["num_ranks"] // numbers["num_nodes"])
    nodes_of_groups = [
        len(set(nodes_R[groups_R == group].tolist()))
        for groups_R in groups_LR
        for group in range(numbers["num_groups"])
    ]
    divides = numbers["num_groups"] % numbers["num_nodes"] == 0
    assert placement.num_nodes == (numbers["num_nodes"] if divides else 1)
    assert not divides or set(nodes_of_groups) == {1}


@settings(max_examples=30, deadline=None)
@given(cases())
def test_no_layer_is_worse_than_the_greedy_start(case: Case) -> None:
    load_LE, numbers = case.load_LE, case.numbers | {"num_groups": 1, "num_nodes": 1}
    counts_LE = replicate(load_LE, numbers["num_replicas"])
    held_LR = np.repeat(np.tile(np.arange(load_LE.shape[1]), len(load_LE)), counts_LE.ravel()).reshape(len(load_LE), -1)
    packed_LGS = pack(np.take_along_axis(load_LE / counts_LE, held_LR, axis=1), numbers["num_ranks"])
    greedy_LR = np.take_along_axis(held_LR, packed_LGS.reshape(held_LR.shape), axis=1)
    greedy = Placement.of(greedy_LR, num_experts=load_LE.shape[1], num_ranks=numbers["num_ranks"])
    found = plan(load_LE, **numbers)
    assert (largest(found, load_LE) <= largest(greedy, load_LE) * (1 + 1e-9)).all()
    assert 0 < balancedness(found, load_LE) <= 1 + 1e-9


def test_a_greedy_choice_that_was_bad_is_mended_by_an_exchange() -> None:
    load_LE = np.array([[8.0, 7.0, 6.0, 5.0, 4.0, 0.0]])  # best: 8, 7, 0 against 6, 5, 4
    assert load_LE[0, pack(load_LE, 2)[0]].sum(axis=1).tolist() == [17.0, 13.0]
    placement = plan(load_LE, num_replicas=6, num_groups=1, num_nodes=1, num_ranks=2)
    assert rank_loads(placement, load_LE).tolist() == [[15.0, 15.0]]


def test_hot_experts_on_many_ranks_are_nearly_even() -> None:
    load_LE = zipf(4, 256, exponent=1.2, seed=3)
    placement = plan(load_LE, num_replicas=288, num_groups=1, num_nodes=1, num_ranks=32)
    assert balancedness(placement, load_LE) > 0.999


def test_replicas_go_to_the_layers_that_gain_by_them() -> None:
    load_LE = np.concatenate([zipf(3, 64, exponent=0.0, seed=5), zipf(3, 64, exponent=1.8, seed=5)])
    numbers = {"num_groups": 1, "num_nodes": 1, "num_ranks": 16}
    budgets_L = replica_budgets(load_LE, total_replicas=6 * 80, **numbers)
    assert budgets_L.sum() <= 6 * 80
    assert set((budgets_L % 16).tolist()) == {0}
    assert budgets_L[:3].tolist() == [64, 64, 64]
    by_layer = plan(load_LE, num_replicas=budgets_L, **numbers)
    assert (by_layer.physical_to_logical_LR >= 0).sum(axis=1).tolist() == budgets_L.tolist()
    alike = plan(load_LE, num_replicas=80, **numbers)
    assert balancedness(by_layer, load_LE) > balancedness(alike, load_LE) + 0.02


@settings(max_examples=25, deadline=None)
@given(cases(), st.integers(0, 6))
def test_budgets_by_layer_are_never_worse_than_the_same_for_all(case: Case, extra: int) -> None:
    numbers = {name: case.numbers[name] for name in ("num_groups", "num_nodes", "num_ranks")}
    replicas = case.numbers["num_replicas"]
    total = len(case.load_LE) * replicas + extra * case.numbers["num_ranks"]
    budgets_L = replica_budgets(case.load_LE, total_replicas=total, most_replicas=2 * replicas, **numbers)
    assert budgets_L.sum() <= total
    by_layer = plan(case.load_LE, num_replicas=budgets_L, **numbers)
    alike = plan(case.load_LE, num_replicas=replicas, **numbers)
    assert largest(by_layer, case.load_LE).sum() <= largest(alike, case.load_LE).sum() * (1 + 1e-9)


NUMBERS: dict[str, Any] = {"num_replicas": 12, "num_groups": 4, "num_nodes": 2, "num_ranks": 4}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"num_replicas": 13}, "13 replicas are not divisible by 4 ranks; use 16"),
        ({"num_replicas": 4}, "4 replicas cannot hold 8 experts: at least 8 are needed"),
        ({"num_replicas": [12, 12]}, "one for each of 1 layers"),
        ({"num_replicas": 12.5}, "one integer"),
        ({"num_groups": 3}, "8 experts are not divisible by 3 groups; use 9"),
        ({"num_ranks": 3}, "3 ranks are not divisible by 2 nodes; use 4"),
        ({"num_nodes": 0}, "at least one of the nodes"),
    ],
)
def test_numbers_that_do_not_divide_are_refused_with_what_would(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(BadNumbers, match=says):
        plan(np.ones((1, 8)), **(NUMBERS | wrong))


@pytest.mark.parametrize("load", [[1.0] * 8, [[1.0, float("nan")] * 4], [[-1.0] * 8], [[float("inf")] * 8], [[]]])
def test_a_load_that_is_no_table_of_counts_is_refused(load: list[Any]) -> None:
    with pytest.raises(BadLoad):
        plan(load, **NUMBERS)


def test_a_budget_that_cannot_hold_every_expert_is_refused() -> None:
    with pytest.raises(BadNumbers, match="need 16 replicas in total and at least 8 slots in a layer; there are 12"):
        replica_budgets(np.ones((2, 8)), total_replicas=12, num_groups=4, num_nodes=2, num_ranks=4)

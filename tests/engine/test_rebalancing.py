"""Expert rebalancing: when experts move to other ranks, where to, and which replica computes a token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moiety_engine.config import EngineConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.moe.balancer import MIN_PICKS, Balancer
from moiety_engine.moe.expert_slots import ExpertSlots
from moiety_engine.moe.tenants import TenantSlots
from moiety_placement.placement_table import Ints, Placement, balancedness

EXPERTS, RANKS, LAYERS, EVERY_S, CAREFUL = 16, 4, 6, 60.0, 0.01


def in_order(num_layers: int = LAYERS) -> Placement:
    row = [rank * 4 + place if place < 4 else (rank * 4 + 4) % EXPERTS for rank in range(RANKS) for place in range(5)]
    return Placement.of([row] * num_layers, num_experts=EXPERTS, num_ranks=RANKS)


def make_balancer(most_writes: int = 2) -> Balancer:
    return Balancer(in_order(), every_s=EVERY_S, most_writes=most_writes, now_s=0.0)


def skewed(seed: int, scale: int = 1000) -> Ints:
    popularity_E = np.arange(1, EXPERTS + 1) ** -0.8
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(popularity_E * scale).astype(np.int64) for _ in range(LAYERS)])


def follow(balancer: Balancer) -> int:
    """Carry out all open moves; return the number of slots that they write."""
    num_writes = 0
    while (move := balancer.next_move()) is not None or balancer.is_moving:
        if move is not None:
            num_writes += len(move[1])
            balancer.complete_move()
            assert balancer.placement.counts_LE.min() >= 1
    return num_writes


def test_a_skewed_load_moves_experts_once_and_the_same_load_moves_no_more() -> None:
    balancer, load_LE = make_balancer(), skewed(0)
    balancer.count(load_LE)
    assert not balancer.evaluate(EVERY_S - 1, CAREFUL)
    assert balancer.evaluate(EVERY_S, CAREFUL)
    moved = follow(balancer)
    assert moved > 0
    assert balancer.rebalances_total == 1
    assert balancer.balancedness == balancedness(in_order(), load_LE) < 0.8
    assert balancer.balancedness_planned == balancedness(balancer.placement, load_LE) > 0.9
    assert not balancer.evaluate(2 * EVERY_S, CAREFUL)  # nothing was counted since
    balancer.count(load_LE)
    assert balancer.evaluate(3 * EVERY_S, CAREFUL)
    assert follow(balancer) == 0
    assert balancer.rebalances_total == 1
    assert balancer.balancedness == balancer.balancedness_planned > 0.9


def test_replicas_go_first_to_the_experts_of_the_class_whose_tokens_weigh_more() -> None:
    """One class has a tenth of the tokens, on other experts than the rest."""
    few_LE, many_LE = np.full((LAYERS, EXPERTS), 10), np.full((LAYERS, EXPERTS), 100)
    few_LE[:, 6], many_LE[:, 11] = 600, 6000
    evenness = {}
    for weight in (1, 50):
        balancer = make_balancer()
        balancer.count(few_LE + many_LE, weight * few_LE + many_LE)
        assert balancer.evaluate(EVERY_S, CAREFUL)
        follow(balancer)
        counts_LE = balancer.placement.counts_LE
        assert (counts_LE[:, 6] > 1).all() == (weight == 50)
        evenness[weight] = [balancedness(balancer.placement, one) for one in (few_LE, many_LE)]
    assert evenness[50][0] > 1.5 * evenness[1][0]
    assert evenness[50][1] < evenness[1][1], "replicas are divided, not added"


def test_weights_do_not_replace_tokens_where_too_few_were_counted() -> None:
    balancer, picks_LE = make_balancer(), np.full((LAYERS, EXPERTS), MIN_PICKS - 1)
    balancer.count(picks_LE, 200 * picks_LE)
    assert not balancer.evaluate(EVERY_S, CAREFUL)


@pytest.mark.parametrize("wrong", ["8,2,x", "0,1", "256", "-1", "1,,1", " "])
def test_weights_of_ranks_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(InvalidConfig, match="--expert-rank-weights must be"):
        EngineConfig(model="m", name="m", tp=2, ep=2, redundant_experts=2, expert_rank_weights=wrong)


def test_weights_need_experts_that_move_and_the_last_one_is_that_of_all_further_ranks() -> None:
    with pytest.raises(InvalidConfig, match="needs experts that move"):
        EngineConfig(model="m", name="m", expert_rank_weights="2,1")
    config = EngineConfig(model="m", name="m", tp=2, ep=2, redundant_experts=2, expert_rank_weights="8, 2,1")
    slots = TenantSlots(rank_weights=config.rank_weights)
    assert [slots.weight_of_rank(rank) for rank in range(5)] == [8, 2, 1, 1, 1]
    assert TenantSlots().weight_of_rank(0) == TenantSlots().weight_of_rank(3) == 1


def test_a_rebalance_ends_with_its_last_layer_also_where_that_one_stays_as_it_is() -> None:
    balancer, load_LE = make_balancer(), np.full((LAYERS, EXPERTS), 1000)
    load_LE[:4, 1] = 30_000  # planned first, all at once
    load_LE[5] = [16_000, *[0] * 15]  # on two ranks already; a third gains 0.67
    balancer.count(load_LE)
    assert balancer.evaluate(EVERY_S, 0.8)
    assert follow(balancer) > 0
    assert balancer.rebalances_total == 1


def test_layers_move_one_after_the_other_the_most_uneven_first_and_a_few_weights_at_a_time() -> None:
    balancer, load_LE = make_balancer(), np.full((LAYERS, EXPERTS), 1000)
    load_LE[[0, 2, 3, 5], [1, 5, 9, 13]] = 9000  # as many layers as are planned at once, …
    load_LE[4, 1] = 20_000  # … of which this is one
    balancer.count(load_LE)
    assert balancer.evaluate(EVERY_S, CAREFUL)
    layers = []
    while (move := balancer.next_move()) is not None:
        assert len(move[1]) <= 4  # two, or experts that change places in a ring
        layers.append(move[0])
        balancer.complete_move()
    assert 4 in layers[: layers.index(5)]
    changes = [before != after for before, after in pairwise(layers)]
    assert sum(changes) == len(set(layers)) - 1


def test_no_expert_moves_with_few_tokens_or_when_the_cost_exceeds_the_gain() -> None:
    few, dear = make_balancer(), make_balancer()
    few.count(np.eye(LAYERS, EXPERTS, dtype=np.int64) * (MIN_PICKS * EXPERTS - 1))
    assert not few.evaluate(EVERY_S, CAREFUL)
    few.count(np.eye(LAYERS, EXPERTS, dtype=np.int64))  # the counts of before are enough
    assert few.evaluate(2 * EVERY_S, CAREFUL)
    dear.count(skewed(1))
    assert dear.evaluate(EVERY_S, 10.0)
    assert follow(dear) == 0
    assert dear.balancedness < 0.8


@dataclass(frozen=True)
class Told:
    """Ranks that have exchanged their counts."""

    all_RE: Tensor
    rank: int
    size: int = RANKS

    def all_gather(self, x_E: Tensor) -> Tensor:
        assert torch.equal(x_E, self.all_RE[self.rank])
        return self.all_RE


@settings(max_examples=30)
@given(st.integers(0, 1 << 32), st.sampled_from([0, 3, 40, 400]))
def test_ranks_with_tokens_of_their_own_choose_the_same_replicas_without_asking(seed: int, num_tokens: int) -> None:
    rng = np.random.default_rng(seed)
    row = in_order().physical_to_logical_LR[0]
    popularity_E = rng.pareto(1.0, EXPERTS) + 0.01
    picks = [
        torch.from_numpy(np.argsort(-(rng.random((tokens, EXPERTS)) ** (1 / popularity_E)), axis=1)[:, :2]).int()
        for tokens in rng.integers(0, num_tokens + 1, RANKS)
    ]
    counts_RE = torch.stack([torch.bincount(one.flatten(), minlength=EXPERTS) for one in picks])
    device = torch.device("cpu")
    found: list[Tensor] = []
    for rank, expert_TK in enumerate(picks):
        slots = ExpertSlots(row.tolist(), EXPERTS, num_parts=RANKS, own_part=rank, device=device)
        slot_TK = slots.of(expert_TK, Told(counts_RE, rank))
        assert slot_TK.dtype is torch.int32
        assert np.array_equal(row[slot_TK.numpy()], expert_TK.numpy())
        found.append(slot_TK.flatten())
        own_TK = slots.here(slot_TK)
        assert torch.equal(own_TK >= 0, slot_TK // slots.num_held == rank)
        assert torch.equal(own_TK[own_TK >= 0], slot_TK[own_TK >= 0] % slots.num_held)
    together = ExpertSlots(row.tolist(), EXPERTS, num_parts=RANKS, own_part=0, device=device).of(torch.cat(picks))
    assert torch.equal(together.flatten(), torch.cat(found))


@pytest.mark.parametrize("counts", [True, False], ids=["counting", "without waiting"])
@pytest.mark.parametrize("num_tokens", [8, 2000])
def test_few_tokens_read_no_expert_twice_and_many_are_spread_evenly(num_tokens: int, counts: bool) -> None:
    row, device = in_order().physical_to_logical_LR[0].tolist(), torch.device("cpu")
    slots = ExpertSlots(row, EXPERTS, num_parts=RANKS, own_part=0, device=device, counts=counts)
    hot = torch.tensor([[0, 4, 8, 12]]).int().expand(num_tokens, 4)  # each is on two ranks of the four
    slot_TK = slots.of(hot)
    assert torch.equal(torch.tensor(row)[slot_TK.long()], hot.long())
    used, tokens = slot_TK.unique(return_counts=True)
    by_rank = torch.bincount(used // slots.num_held, tokens, minlength=RANKS)
    assert len(used) == (4 if num_tokens == 8 else 8)
    assert by_rank.tolist() == [num_tokens] * RANKS


def test_a_choice_without_waiting_goes_by_the_tokens_of_all_ranks() -> None:
    row, device = in_order().physical_to_logical_LR[0].tolist(), torch.device("cpu")
    slots = ExpertSlots(row, EXPERTS, num_parts=RANKS, own_part=0, device=device, counts=False)
    hot = torch.zeros(100, 1).int()  # six for each expert, of one rank; 25 if the others have as many
    assert len(slots.of(hot).unique()) == 1
    assert len(slots.of(hot, Told(torch.zeros(RANKS, EXPERTS), 0)).unique()) == 2

"""Transitions between two placements that are both in use: every expert is always present."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_placement.errors import BadNumbers
from moiety_placement.matching import moves
from moiety_placement.placement_table import Ints, Placement
from moiety_placement.transition import transition

EXPERTS, RANKS = 12, 4
seeds = st.integers(0, 1 << 32)


def placed(slots_R: Ints, num_ranks: int = RANKS) -> Placement:
    return Placement.of([slots_R], num_experts=EXPERTS, num_ranks=num_ranks)


def draw_slots(rng: np.random.Generator, spare: int) -> Ints:
    return rng.permutation(np.concatenate([np.arange(EXPERTS), rng.integers(0, EXPERTS, spare)]))


@given(seeds, st.sampled_from([0, 4, 12]), st.integers(1, 5))
def test_between_any_two_batches_every_expert_is_in_some_slot(seed: int, spare: int, most_writes: int) -> None:
    rng = np.random.default_rng(seed)
    old, new = placed(draw_slots(rng, spare)), placed(draw_slots(rng, spare))
    now_R = np.array(old.physical_to_logical_LR[0])
    num_writes = 0
    for batch in transition(old, new, 0, most_writes=most_writes):
        assert batch
        assert [now_R[write.source] for write in batch] == [write.expert for write in batch]
        ring = {write.expert for write in batch} & {int(now_R[write.slot]) for write in batch}
        assert len(batch) <= most_writes or ring
        for write in batch:
            now_R[write.slot] = write.expert
        assert set(now_R.tolist()) == set(range(EXPERTS))
        num_writes += len(batch)
    assert now_R.tolist() == new.physical_to_logical_LR[0].tolist()
    assert num_writes == moves(old, new)[0]


def test_weights_come_from_the_own_rank_if_it_has_them_and_else_by_turns_from_those_that_do() -> None:
    slots_R = np.array([*range(EXPERTS), 0, 0, 0, 1])  # four ranks of four slots; 0 is on the first and the last
    then_R = slots_R.copy()
    then_R[[15, 2]] = [0, 0]  # the last rank has 0 already, and so does the first
    then_R[[4, 8]] = [0, 0]  # the others do not
    then_R[[12, 13, 14]] = [2, 4, 8]  # what would be nowhere otherwise
    writes = {
        one.slot: one for batch in transition(placed(slots_R), placed(then_R), 0, most_writes=99) for one in batch
    }
    assert writes[15].source // 4 == 3
    assert writes[2].source // 4 == 0
    assert {writes[4].source // 4, writes[8].source // 4} == {0, 3}


def test_placements_that_no_layer_in_use_can_have_are_refused() -> None:
    whole = placed(np.arange(EXPERTS))
    with pytest.raises(BadNumbers, match="no empty slot"):
        next(transition(whole, placed(np.array([*range(EXPERTS - 1), -1])), 0, most_writes=1))
    with pytest.raises(BadNumbers, match="every expert in some slot"):
        next(transition(placed(np.array([0] * EXPERTS)), whole, 0, most_writes=1))
    with pytest.raises(BadNumbers, match="must not change the number"):
        next(transition(whole, placed(np.arange(EXPERTS), num_ranks=2), 0, most_writes=1))
    with pytest.raises(BadNumbers, match="at least one write"):
        next(transition(whole, whole, 0, most_writes=0))

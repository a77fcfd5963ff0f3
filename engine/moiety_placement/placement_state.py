"""Mutable placement: its slots, and small changes that relieve the heaviest rank of each layer.

Dimensions besides the package's: A the examined layers, H ranks of the heaviest rank's node, Q their slots, J slots
that may be overwritten, B experts of the heaviest rank. A change is judged by the largest load among the ranks that it
touches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moiety_placement.placement_table import Floats, Ints, count_replicas, loads_of_slots, sum_by_rank

_HOTTEST = 4  # hottest experts of the heaviest rank: candidates for one more replica


@dataclass(slots=True)
class PlacementState:
    """Slots of a placement, owned by the improving caller. `num_nodes`: changes stay within a node."""

    slots_LR: Ints
    counts_LE: Ints
    load_LE: Floats
    num_ranks: int
    num_nodes: int

    @classmethod
    def of(cls, slots_LR: Ints, load_LE: Floats, num_ranks: int, num_nodes: int) -> PlacementState:
        counts_LE = count_replicas(slots_LR, load_LE.shape[1])
        return cls(slots_LR.copy(), counts_LE, load_LE, num_ranks, num_nodes)

    def view_layers(self, layers_A: Ints) -> LayersState:
        slots_AR, counts_AE, load_AE = self.slots_LR[layers_A], self.counts_LE[layers_A], self.load_LE[layers_A]
        slot_load_AR = loads_of_slots(slots_AR, load_AE, counts_AE)
        load_AG = sum_by_rank(slot_load_AR, self.num_ranks)
        rows_A1 = np.arange(len(layers_A))[:, None]
        ranks_of_node = self.num_ranks // self.num_nodes
        heaviest_A = load_AG.argmax(axis=1)
        return LayersState(slots_AR, counts_AE, load_AE, slot_load_AR, load_AG, heaviest_A, rows_A1, ranks_of_node)

    def largest_loads(self) -> Floats:
        """Return [L]: the load of the heaviest rank."""
        return np.asarray(self.view_layers(np.arange(len(self.slots_LR))).load_AG.max(axis=1))

    def swap(self, layers: Ints, slots: Ints, others: Ints) -> None:
        held = self.slots_LR[layers, slots]
        self.slots_LR[layers, slots] = self.slots_LR[layers, others]
        self.slots_LR[layers, others] = held

    def overwrite(self, layers: Ints, slots: Ints, experts: Ints) -> None:
        self.counts_LE[layers, self.slots_LR[layers, slots]] -= 1
        self.counts_LE[layers, experts] += 1
        self.slots_LR[layers, slots] = experts


@dataclass(frozen=True, slots=True, eq=False)
class LayersState:
    """Current state of some layers of a board. `rows_A1` numbers them, for indexing."""

    slots_AR: Ints
    counts_AE: Ints
    load_AE: Floats
    slot_load_AR: Floats
    load_AG: Floats
    heaviest_A: Ints
    rows_A1: Ints
    ranks_of_node: int

    @property
    def num_ranks(self) -> int:
        return int(self.load_AG.shape[1])

    @property
    def slots_of_rank(self) -> int:
        return int(self.slots_AR.shape[1] // self.load_AG.shape[1])

    def slots_of_heaviest(self) -> Ints:
        """Return [A, S]: the slots of the heaviest rank."""
        return self.heaviest_A[:, None] * self.slots_of_rank + np.arange(self.slots_of_rank)

    def ranks_beside_heaviest(self) -> Ints:
        """Return [A, H]: the ranks of the heaviest rank's node, itself included."""
        node_A = self.heaviest_A // self.ranks_of_node
        return node_A[:, None] * self.ranks_of_node + np.arange(self.ranks_of_node)


def best_swap(view: LayersState) -> tuple[Floats, Ints, Ints]:
    """Return the best exchange of experts in each layer.

    Per layer: the gain, a slot of the heaviest rank and another slot of its node. A gain of 0 or less is none.
    """
    num_slots = view.slots_of_rank
    ranks_AH, mine_AS = view.ranks_beside_heaviest(), view.slots_of_heaviest()
    theirs_AQ = (ranks_AH[:, :, None] * num_slots + np.arange(num_slots)).reshape(len(mine_AS), -1)
    loads_AH = view.load_AG[view.rows_A1, ranks_AH]
    gaps_AQ = np.repeat(loads_AH.max(axis=1, keepdims=True) - loads_AH, num_slots, axis=1)
    gaps_AQ[view.slots_AR[view.rows_A1, theirs_AQ] < 0] = -np.inf  # nothing to exchange
    mine_load_AS, their_load_AQ = view.slot_load_AR[view.rows_A1, mine_AS], view.slot_load_AR[view.rows_A1, theirs_AQ]
    moved_ASQ = mine_load_AS.astype(np.float32)[:, :, None] - their_load_AQ.astype(np.float32)[:, None, :]
    left_ASQ = gaps_AQ.astype(np.float32)[:, None, :] - moved_ASQ
    best_A = np.minimum(moved_ASQ, left_ASQ, out=left_ASQ).reshape(len(mine_AS), -1).argmax(axis=1)
    rows_A, at_A, other_A = view.rows_A1[:, 0], *np.divmod(best_A, theirs_AQ.shape[1])
    moved_A = mine_load_AS[rows_A, at_A] - their_load_AQ[rows_A, other_A]
    gain_A = np.minimum(moved_A, gaps_AQ[rows_A, other_A] - moved_A)  # exact: float32 only located it
    return gain_A, mine_AS[rows_A, at_A], theirs_AQ[rows_A, other_A]


def best_overwrite(view: LayersState) -> tuple[Floats, Ints, Ints]:
    """Return the best overwrite in each layer.

    Per layer: the gain, a slot of the heaviest rank's node and an expert of that rank that replaces the slot's expert.
    The replaced expert keeps another replica.
    """
    slots_AJ, may_AJ = _spare_slots(view)
    hot_AB = _hottest_experts(view)
    ranks_AJ = slots_AJ // view.slots_of_rank
    old_AJ = view.slots_AR[view.rows_A1, slots_AJ]
    held_AGE = _replicas_by_rank(view)
    held_AJG = held_AGE.transpose(0, 2, 1)[view.rows_A1, old_AJ]
    left_AJ = _share(view, old_AJ, -1)  # load of each remaining replica of the old expert
    raised_AJG = view.load_AG[:, None, :] + (left_AJ - _share(view, old_AJ, 0))[:, :, None] * held_AJG
    by_expert = []
    for hot_A1 in np.split(hot_AB, hot_AB.shape[1], axis=1):
        new_A1 = _share(view, hot_A1, 1)
        has_AG = held_AGE[view.rows_A1[:, 0], :, hot_A1[:, 0]]
        after_AJG = raised_AJG - ((_share(view, hot_A1, 0) - new_A1) * has_AG)[:, None, :]
        touched_AJG = (held_AJG > 0) | (has_AG > 0)[:, None, :]
        at_AJ1 = ranks_AJ[:, :, None]
        here = np.take_along_axis(after_AJG, at_AJ1, axis=2) - left_AJ[:, :, None] + new_A1[:, :, None]
        np.put_along_axis(after_AJG, at_AJ1, here, axis=2)
        np.put_along_axis(touched_AJG, at_AJ1, values=True, axis=2)
        worst_AJ = np.max(after_AJG, axis=2, where=touched_AJG, initial=0.0)
        worst_AJ[~may_AJ | (has_AG[view.rows_A1, ranks_AJ] > 0)] = np.inf  # a second one there does not help
        by_expert.append(worst_AJ)
    worst = np.stack(by_expert, axis=1).reshape(len(slots_AJ), -1)
    best_A = worst.argmin(axis=1)
    rows_A, num_spare = view.rows_A1[:, 0], slots_AJ.shape[1]
    gain_A = view.load_AG.max(axis=1) - worst[rows_A, best_A]
    return gain_A, slots_AJ[rows_A, best_A % num_spare], hot_AB[rows_A, best_A // num_spare]


def _spare_slots(view: LayersState) -> tuple[Ints, NDArray[np.bool_]]:
    """Return slots in the heaviest rank's node whose expert has another replica.

    In layers with fewer such slots than others, the list is padded with other slots, as the mask shows.
    """
    slots_AR = view.slots_AR
    counts_AR = view.counts_AE[view.rows_A1, slots_AR]
    nodes_R = np.arange(slots_AR.shape[1]) // (view.slots_of_rank * view.ranks_of_node)
    here_AR = nodes_R == (view.heaviest_A // view.ranks_of_node)[:, None]
    may_AR = (counts_AR > 1) & (slots_AR >= 0) & here_AR
    most = max(1, int(may_AR.sum(axis=1).max()))
    slots_AJ = np.argsort(~may_AR, axis=1, kind="stable")[:, :most]
    return slots_AJ, may_AR[view.rows_A1, slots_AJ]


def _hottest_experts(view: LayersState) -> Ints:
    of_rank_AS = view.slots_of_heaviest()
    loads_AS = view.slot_load_AR[view.rows_A1, of_rank_AS]
    hottest_AB = np.argsort(-loads_AS, axis=1, kind="stable")[:, :_HOTTEST]
    experts_AB = view.slots_AR[view.rows_A1, of_rank_AS[view.rows_A1, hottest_AB]]
    return np.where(experts_AB < 0, experts_AB[:, :1], experts_AB)


def _replicas_by_rank(view: LayersState) -> Ints:
    """Return [A, G, E]: the number of each rank's replicas of each expert."""
    num_layers, num_slots = view.slots_AR.shape
    rank_R = np.arange(num_slots) // view.slots_of_rank
    num_experts = view.load_AE.shape[1]
    flat_AR = (view.rows_A1 * view.num_ranks + rank_R) * num_experts + view.slots_AR
    size = num_layers * view.num_ranks * num_experts
    found = np.bincount(flat_AR[view.slots_AR >= 0], minlength=size)
    return found.reshape(num_layers, view.num_ranks, num_experts)


def _share(view: LayersState, experts: Ints, more: int) -> Floats:
    """Return the load of one replica of each expert if there were `more` more replicas of it."""
    counts = view.counts_AE[view.rows_A1, experts] + more
    return view.load_AE[view.rows_A1, experts] / np.maximum(counts, 1)

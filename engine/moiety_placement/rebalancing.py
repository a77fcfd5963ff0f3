"""Rebalancing while serving: move few weights, those with the most gain, and only where that pays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moiety_placement.errors import BadNumbers, TooFewSlots
from moiety_placement.improvement import step
from moiety_placement.matching import moves
from moiety_placement.placement_state import PlacementState
from moiety_placement.placement_table import Floats, Ints, Placement, check_load, living_ranks

_ROUNDS = 256  # most changes per layer


@dataclass(frozen=True, slots=True, eq=False)
class Rebalance:
    """Result of a rebalance.

    `gain_L`: decrease of the largest rank load, in mean rank loads; below 0 only where lost experts were restored.
    `order`: the changed layers, the one with the most gain per moved weight first.
    """

    placement: Placement
    moves_L: Ints
    gain_L: Floats
    order: tuple[int, ...]


def rebalance(old: Placement, load_LE: ArrayLike, *, move_cost: float) -> Rebalance:
    """Return a placement that differs from the old one in few slots, layer by layer.

    A change gives one slot to another expert, or exchanges two in a node. Each change relieves a layer's heaviest rank;
    of the series of changes, the prefix with the largest net gain is applied: the decrease of the largest rank load in
    mean rank loads, less `move_cost` for each slot written. So `move_cost` is the time to move one expert's weights ÷
    the time in which a balanced layer computes the load, which is the load until the next call.

    Experts without a replica (`without`) are restored first, at any cost, over replicas of others, in any node. Raises
    BadLoad, BadNumbers, or TooFewSlots if there are more of these experts than spare slots.
    """
    loads = check_load(load_LE, (old.num_layers, old.num_experts))
    if not move_cost >= 0:
        raise BadNumbers(f"move_cost is {move_cost}; it must be 0 or more mean rank loads")
    board = PlacementState.of(old.physical_to_logical_LR, loads, old.num_ranks, old.num_nodes)
    mean_L = loads.sum(axis=1) / np.maximum(living_ranks(old).sum(axis=1), 1)
    before_L = board.largest_loads()
    for layer in np.flatnonzero((board.counts_LE == 0).any(axis=1)).tolist():
        _restore_lost_experts(board, layer)
    slots_LR = _best_beginning(board, mean_L, move_cost)
    new = Placement.of(slots_LR, num_experts=old.num_experts, num_ranks=old.num_ranks, num_nodes=old.num_nodes)
    moves_L = moves(old, new)
    after_L = PlacementState.of(slots_LR, loads, old.num_ranks, old.num_nodes).largest_loads()
    gain_L = np.divide(before_L - after_L, mean_L, out=np.zeros_like(mean_L), where=mean_L > 0)
    worth_L = gain_L / np.maximum(moves_L, 1)
    order = tuple(layer for layer in np.argsort(-worth_L, kind="stable").tolist() if moves_L[layer])
    return Rebalance(new, moves_L, gain_L, order)


def _best_beginning(board: PlacementState, mean_L: Floats, move_cost: float) -> Ints:
    """Return [L, R]: the slots at the point of each layer's series of changes with the largest net gain."""
    start_LR, start_L = board.slots_LR.copy(), board.largest_loads()
    best_LR, net_L = start_LR.copy(), np.zeros(len(start_L))
    most_L = np.divide(start_L - mean_L, mean_L, out=np.zeros_like(mean_L), where=mean_L > 0)  # upper bound of the gain
    active_A = np.flatnonzero(most_L > move_cost)
    for _ in range(_ROUNDS):
        if not len(active_A):
            break
        active_A = step(board, active_A)
        gain_A = (start_L[active_A] - board.view_layers(active_A).load_AG.max(axis=1)) / mean_L[active_A]
        costs_A = move_cost * (board.slots_LR[active_A] != start_LR[active_A]).sum(axis=1)
        better_A = gain_A - costs_A > net_L[active_A]
        net_L[active_A] = np.maximum(net_L[active_A], gain_A - costs_A)
        best_LR[active_A[better_A]] = board.slots_LR[active_A[better_A]]
        active_A = active_A[most_L[active_A] - costs_A > net_L[active_A]]
    return best_LR


def _restore_lost_experts(board: PlacementState, layer: int) -> None:
    """Restore the lost experts of a layer, the most used first, each over the replica that costs least."""
    load_E = board.load_LE[layer]
    lost = np.flatnonzero(board.counts_LE[layer] == 0)
    spare = int(np.maximum(board.counts_LE[layer] - 1, 0).sum())
    if len(lost) > spare:
        raise TooFewSlots(
            f"layer {layer} has lost {len(lost)} experts, but only {spare} slots hold replicas that they "
            f"could replace: bring {len(lost) - spare} more slots back into service"
        )
    for expert in lost[np.argsort(-load_E[lost], kind="stable")].tolist():
        slots_R, counts_E = board.slots_LR[layer], board.counts_LE[layer]
        spare_J = np.flatnonzero((slots_R >= 0) & (counts_E[slots_R] > 1))
        held_J = slots_R[spare_J]
        share_J = load_E[held_J] / counts_E[held_J]
        raised_J = load_E[held_J] / (counts_E[held_J] - 1) - share_J
        loads_G = board.view_layers(np.array([layer])).load_AG[0]
        rank_J = spare_J // (len(slots_R) // board.num_ranks)
        chosen = spare_J[np.argmin(loads_G[rank_J] - share_J + raised_J)]
        board.overwrite(np.array([layer]), np.array([chosen]), np.array([expert]))

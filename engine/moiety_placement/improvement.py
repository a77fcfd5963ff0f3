"""Improvement of a plan by small changes that each relieve the heaviest rank of a layer, until none does."""

from __future__ import annotations

import numpy as np

from moiety_placement.placement_state import PlacementState, best_overwrite, best_swap
from moiety_placement.placement_table import Ints

_MIN_GAIN = 1e-9  # of the largest load; less is rounding


def improve_by_swaps(board: PlacementState, layers_A: Ints, rounds: int) -> None:
    """Apply one exchange per layer and round. The largest load never grows."""
    for _ in range(rounds):
        if not len(layers_A):
            return
        view = board.view_layers(layers_A)
        gain_A, slot_A, other_A = best_swap(view)
        gains_A = gain_A > _MIN_GAIN * view.load_AG.max(axis=1)
        layers_A = layers_A[gains_A]
        board.swap(layers_A, slot_A[gains_A], other_A[gains_A])


def improve(board: PlacementState, layers_A: Ints, rounds: int) -> None:
    """Apply exchanges, as above, and overwrites of slots with other experts."""
    for _ in range(rounds):
        if not len(layers_A):
            return
        layers_A = step(board, layers_A)


def step(board: PlacementState, layers_A: Ints) -> Ints:
    """Apply in each layer the change with the most gain per moved weight; return the changed layers.

    An exchange moves two weights, an overwrite one.
    """
    view = board.view_layers(layers_A)
    swap_gain_A, slot_A, other_A = best_swap(view)
    write_gain_A, written_A, expert_A = best_overwrite(view)
    least_A = _MIN_GAIN * view.load_AG.max(axis=1)
    writes_A = (write_gain_A > least_A) & (write_gain_A >= swap_gain_A / 2)
    swaps_A = (swap_gain_A > least_A) & ~writes_A
    board.swap(layers_A[swaps_A], slot_A[swaps_A], other_A[swaps_A])
    board.overwrite(layers_A[writes_A], written_A[writes_A], expert_A[writes_A])
    return np.asarray(layers_A[swaps_A | writes_A])

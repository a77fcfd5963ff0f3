"""Comparison of successive placements: the weights to move, and a relabelled plan that moves fewer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moiety_placement.errors import BadNumbers
from moiety_placement.placement_table import EMPTY, Ints, Placement


def moves(old: Placement, new: Placement) -> Ints:
    """Return [L]: the number of slots to write, each with one expert's weights.

    Raises BadNumbers if the placements differ in shape.
    """
    _check_alike(old, new)
    old_LR, new_LR = old.physical_to_logical_LR, new.physical_to_logical_LR
    return np.asarray(((old_LR != new_LR) & (new_LR != EMPTY)).sum(axis=1))


def keep_in_place(new: Placement, old: Placement) -> Placement:
    """Relabel a new placement so that it keeps more experts in their old slots.

    Ranks, nodes of ranks and slots of a rank are relabelled so that as many slots as a greedy match finds keep their
    contents. The rank loads are permuted only. Raises BadNumbers if the placements differ in shape.
    """
    _check_alike(old, new)
    same_LGG = _held(new) @ _held(old).transpose(0, 2, 1)  # experts of a new rank that are already on an old one
    become_LG = _match_ranks(same_LGG, new.num_nodes)
    num_layers, num_ranks = become_LG.shape
    layers_L1 = np.arange(num_layers)[:, None]
    slots_LGS = np.empty((num_layers, num_ranks, new.num_slots // num_ranks), dtype=np.int64)
    slots_LGS[layers_L1, become_LG] = new.physical_to_logical_LR.reshape(slots_LGS.shape)
    old_LGS = old.physical_to_logical_LR.reshape(slots_LGS.shape)
    slots_LR = _match_slots(slots_LGS, old_LGS).reshape(num_layers, -1)
    fewer_L1 = (moves(old, _like(new, slots_LR)) < moves(old, new))[:, None]  # a greedy match may be worse
    return _like(new, np.where(fewer_L1, slots_LR, new.physical_to_logical_LR))


def _like(placement: Placement, slots_LR: Ints) -> Placement:
    return Placement.of(
        slots_LR, num_experts=placement.num_experts, num_ranks=placement.num_ranks, num_nodes=placement.num_nodes
    )


def _held(placement: Placement) -> NDArray[np.float32]:
    """Return [L, G, E]: 1 where a rank has an expert."""
    held = np.zeros((placement.num_layers, placement.num_ranks, placement.num_experts + 1), dtype=np.float32)
    layers_L1 = np.arange(placement.num_layers)[:, None]
    held[layers_L1, placement.rank_R, placement.physical_to_logical_LR] = 1  # the last column is for empty slots
    return held[:, :, :-1]


def _match_ranks(same_LGG: NDArray[np.float32], num_nodes: int) -> Ints:
    """Return [L, G]: the old rank that each new one becomes; whole nodes become whole nodes."""
    num_layers, num_ranks, _ = same_LGG.shape
    of_node = num_ranks // num_nodes
    by_node = same_LGG.reshape(num_layers, num_nodes, of_node, num_nodes, of_node)
    node_LN = _match(by_node.max(axis=4).sum(axis=2))
    become_LGs = []
    for node in range(num_nodes):
        target_L = node_LN[:, node]
        within = by_node[np.arange(num_layers), node, :, target_L]
        become_LGs.append(target_L[:, None] * of_node + _match(within))
    return np.concatenate(become_LGs, axis=1)


def _match(gain_LXX: NDArray[np.float32]) -> Ints:
    """Return [L, X], for X matched items: a distinct partner for each row, the pair with the most gain first."""
    num_layers, size, _ = gain_LXX.shape
    left = gain_LXX.copy()
    layers = np.arange(num_layers)
    partner_LX = np.empty((num_layers, size), dtype=np.int64)
    for _ in range(size):
        best_L = left.reshape(num_layers, -1).argmax(axis=1)
        rows_L, columns_L = best_L // size, best_L % size
        partner_LX[layers, rows_L] = columns_L
        left[layers, rows_L, :] = -1
        left[layers, :, columns_L] = -1
    return partner_LX


def _match_slots(new_LGS: Ints, old_LGS: Ints) -> Ints:
    """Return [X, S], X being L·G: the experts of each rank's slots, in their old slots where they were there.

    The others fill the remaining slots in order.
    """
    num_slots = new_LGS.shape[2]
    new_XS, old_XS = new_LGS.reshape(-1, num_slots), old_LGS.reshape(-1, num_slots)
    same_XSS = _keys(new_XS)[:, :, None] == _keys(old_XS)[:, None, :]
    stays_XS, taken_XS = same_XSS.any(axis=2), same_XSS.any(axis=1)
    to_XS = np.where(stays_XS, same_XSS.argmax(axis=2), 0)
    comers_XS = np.argsort(stays_XS, axis=1, kind="stable")  # experts new on this rank come first
    free_XS = np.argsort(taken_XS, axis=1, kind="stable")
    new_here = np.arange(num_slots) < (~stays_XS).sum(axis=1, keepdims=True)
    rows, places = np.nonzero(new_here)
    to_XS[rows, comers_XS[rows, places]] = free_XS[rows, places]
    placed_XS = np.empty_like(new_XS)
    np.put_along_axis(placed_XS, to_XS, new_XS, axis=1)
    return placed_XS


def _keys(slots_XS: Ints) -> Ints:
    """Return keys that differ for the second replica of an expert on a rank."""
    earlier_XSS = np.tril(slots_XS[:, :, None] == slots_XS[:, None, :], -1)
    return np.asarray(slots_XS * slots_XS.shape[1] + earlier_XSS.sum(axis=2))


def _check_alike(old: Placement, new: Placement) -> None:
    shapes = [(p.num_layers, p.num_experts, p.num_slots, p.num_ranks) for p in (old, new)]
    if shapes[0] != shapes[1]:
        raise BadNumbers(f"placements of different layers, experts, slots or ranks: {shapes[0]} and {shapes[1]}")

"""Placement of experts: the expert of each slot, and the resulting rank loads.

The package's docstring explains the dimensions. Slot r of a layer is on rank r // S. An empty slot has -1: it is on a
dead rank, or its layer has fewer replicas than others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moiety_placement.errors import BadLoad, BadNumbers

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
EMPTY = -1


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A placement with its inverse.

    `logical_to_physical_LEC` lists each expert's slots in ascending order, padded by -1; `counts_LE` is their number,
    `rank_R` the rank of each slot. The arrays are read-only.
    """

    physical_to_logical_LR: Ints
    logical_to_physical_LEC: Ints
    counts_LE: Ints
    rank_R: Ints
    num_ranks: int
    num_nodes: int  # experts stay within a node; 1 where they may be on any rank

    @classmethod
    def of(
        cls, physical_to_logical_LR: ArrayLike, *, num_experts: int, num_ranks: int, num_nodes: int = 1
    ) -> Placement:
        """Build a placement from its slots.

        Raises BadNumbers if the ranks do not divide the slots, the nodes do not divide the ranks, or an expert does not
        exist.
        """
        slots_LR = np.array(physical_to_logical_LR, dtype=np.int64)
        if slots_LR.ndim != 2:
            raise BadNumbers(f"a placement must be an array of layers × slots, not of shape {slots_LR.shape}")
        check_divides(num_ranks, slots_LR.shape[1], "ranks", "slots")
        check_divides(num_nodes, num_ranks, "nodes", "ranks")
        if slots_LR.size and not EMPTY <= slots_LR.min() <= slots_LR.max() < num_experts:
            raise BadNumbers(f"slots hold an expert from 0 to {num_experts - 1}, or {EMPTY} for none")
        counts_LE = count_replicas(slots_LR, num_experts)
        logical_to_physical_LEC = _slots_of_experts(slots_LR, counts_LE)
        rank_R = np.arange(slots_LR.shape[1]) // (slots_LR.shape[1] // num_ranks)
        for array in (slots_LR, logical_to_physical_LEC, counts_LE, rank_R):
            array.flags.writeable = False
        return cls(slots_LR, logical_to_physical_LEC, counts_LE, rank_R, num_ranks, num_nodes)

    @property
    def num_layers(self) -> int:
        return len(self.physical_to_logical_LR)

    @property
    def num_experts(self) -> int:
        return int(self.counts_LE.shape[1])

    @property
    def num_slots(self) -> int:
        return len(self.rank_R)


def living_ranks(placement: Placement) -> Bools:
    """Return [L, G]: whether a rank holds any expert of a layer."""
    held_LGS = (placement.physical_to_logical_LR != EMPTY).reshape(placement.num_layers, placement.num_ranks, -1)
    return np.asarray(held_LGS.any(axis=2))


def rank_loads(placement: Placement, load_LE: ArrayLike) -> Floats:
    """Return [L, G]: the load of each rank if an expert's load is split evenly over its replicas.

    The load of an expert without replicas is not counted.
    """
    loads = check_load(load_LE, (placement.num_layers, placement.num_experts))
    slot_loads_LR = loads_of_slots(placement.physical_to_logical_LR, loads, placement.counts_LE)
    return sum_by_rank(slot_loads_LR, placement.num_ranks)


def balancedness(placement: Placement, load_LE: ArrayLike) -> float:
    """Return the mean load of the living ranks ÷ the largest load, each summed over layers; 1 without load."""
    loads_LG = rank_loads(placement, load_LE)
    largest = loads_LG.max(axis=1).sum()
    means_L = loads_LG.sum(axis=1) / np.maximum(living_ranks(placement).sum(axis=1), 1)
    return float(means_L.sum() / largest) if largest > 0 else 1.0


def loads_of_slots(slots_LR: Ints, load_LE: Floats, counts_LE: Ints) -> Floats:
    """Return [L, R]: the part of its expert's load that each slot carries, 0 for an empty one."""
    shares_LE = load_LE / np.maximum(counts_LE, 1)
    shares_LE = np.concatenate([shares_LE, np.zeros((len(shares_LE), 1))], axis=1)  # selected by index -1
    return shares_LE[np.arange(len(slots_LR))[:, None], slots_LR]


def sum_by_rank(slot_loads_LR: Floats, num_ranks: int) -> Floats:
    """Return [L, G]: the slot loads summed by rank."""
    num_layers, num_slots = slot_loads_LR.shape
    return np.asarray(slot_loads_LR.reshape(num_layers, num_ranks, num_slots // num_ranks).sum(axis=2))


def count_replicas(slots_LR: Ints, num_experts: int) -> Ints:
    """Return [L, E]: the number of slots of each expert."""
    num_layers = len(slots_LR)
    flat = np.arange(num_layers)[:, None] * num_experts + slots_LR
    return np.bincount(flat[slots_LR >= 0], minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def check_load(load_LE: ArrayLike, shape: tuple[int, int] | None = None) -> Floats:
    """Return the load as floats. Raises BadLoad if it is not a table of counts, or not of the given shape."""
    loads = np.asarray(load_LE, dtype=np.float64)
    if loads.ndim != 2 or 0 in loads.shape:
        raise BadLoad(f"a load must be an array of layers × experts, not of shape {loads.shape}")
    if shape is not None and loads.shape != shape:
        raise BadLoad(f"the placement has {shape[0]} layers × {shape[1]} experts, the load {loads.shape}")
    if not np.isfinite(loads).all() or loads.min() < 0:
        raise BadLoad("a load's counts must be finite and not negative")
    return loads


def check_divides(divisor: int, number: int, divisors: str, numbers: str) -> None:
    """Raise BadNumbers, with the nearest valid number above, unless `divisor` > 0 divides `number`."""
    if divisor < 1:
        raise BadNumbers(f"there must be at least one of the {divisors}, not {divisor}")
    if number % divisor:
        above = -(-number // divisor) * divisor
        raise BadNumbers(f"{number} {numbers} are not divisible by {divisor} {divisors}; use {above}")


def _slots_of_experts(slots_LR: Ints, counts_LE: Ints) -> Ints:
    num_layers, num_experts = counts_LE.shape
    keys_LR = np.where(slots_LR >= 0, slots_LR, num_experts)
    order_LR = np.argsort(keys_LR, axis=1, kind="stable")
    experts_LR = np.take_along_axis(keys_LR, order_LR, axis=1)
    starts_LE = np.cumsum(counts_LE, axis=1) - counts_LE
    layers, places = np.nonzero(experts_LR < num_experts)
    experts = experts_LR[layers, places]
    found = np.full((num_layers, num_experts, max(1, int(counts_LE.max(initial=0)))), EMPTY, dtype=np.int64)
    found[layers, experts, places - starts_LE[layers, experts]] = order_LR[layers, places]
    return found

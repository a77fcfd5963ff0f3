"""Placement after the loss of ranks, and the experts of a start without some ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moiety_placement.errors import BadNumbers
from moiety_placement.placement_table import EMPTY, Ints, Placement
from moiety_placement.rebalancing import rebalance


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """Placement without the dead ranks.

    Their slots are empty.

    `lost_LE`: the experts whose only replicas were on dead ranks.
    """

    placement: Placement
    lost_LE: NDArray[np.bool_]


def without(placement: Placement, ranks: Collection[int]) -> Survivors:
    """Return the placement with these ranks' slots empty, so that no token is assigned to them.

    `rebalance` restores lost experts, and `plan` gives experts to a rank that returned. Raises BadNumbers for ranks
    that do not exist, or if all ranks are dead.
    """
    dead = sorted(set(ranks))
    if dead and not 0 <= dead[0] <= dead[-1] < placement.num_ranks:
        raise BadNumbers(f"ranks are 0 to {placement.num_ranks - 1}, not {dead[0]} to {dead[-1]}")
    if len(dead) == placement.num_ranks:
        raise BadNumbers(f"all {placement.num_ranks} ranks have failed: no rank is left for the experts")
    gone_R = np.isin(placement.rank_R, dead)
    left = Placement.of(
        np.where(gone_R, EMPTY, placement.physical_to_logical_LR),
        num_experts=placement.num_experts,
        num_ranks=placement.num_ranks,
        num_nodes=placement.num_nodes,
    )
    return Survivors(left, (placement.counts_LE > 0) & (left.counts_LE == 0))


def start_without(ranks: Collection[int], *, num_ranks: int, num_experts: int, slots_each: int) -> Ints:
    """Return [R]: the expert of each slot of a layer on the living ranks, one rank's slots after the other's.

    Before ranks died, each had its share of the experts, in order, and in the slots beyond it the first ones of the
    next share; `rebalance` then restores lost experts, as if all experts had equal load. No rank has an expert twice.
    Raises BadNumbers as `without`, or if a rank has more slots than there are experts, and TooFewSlots if the slots are
    too few.
    """
    if slots_each > num_experts:
        raise BadNumbers(
            f"a rank has {slots_each} slots, more than the {num_experts} experts: use at most {num_experts}"
        )
    first_G = np.arange(num_ranks) * num_experts // num_ranks
    slots_GS = (first_G[:, None] + np.arange(slots_each)) % num_experts
    whole = Placement.of(slots_GS.reshape(1, -1), num_experts=num_experts, num_ranks=num_ranks)
    left = without(whole, ranks).placement
    done = rebalance(left, np.ones((1, num_experts)), move_cost=0.0).placement
    slots_R = done.physical_to_logical_LR[0]
    slots_GS = slots_R[slots_R != EMPTY].reshape(-1, slots_each)
    _replace_doubles(slots_GS, num_experts)
    return np.asarray(slots_GS.ravel())


def _replace_doubles(slots_GS: Ints, num_experts: int) -> None:
    """Replace the second replica of an expert on one rank, which is of no use.

    An expert that the rank does not have takes its slot: one with the fewest replicas.
    """
    for own_S in slots_GS:
        for place in range(len(own_S)):
            if own_S[place] in own_S[:place]:
                counts_E = np.bincount(slots_GS.ravel(), minlength=num_experts)
                counts_E[own_S] = slots_GS.size + 1
                own_S[place] = counts_E.argmin()

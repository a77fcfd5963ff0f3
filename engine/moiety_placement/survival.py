"""What is left of a placement when ranks die."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moiety_placement.errors import BadNumbers
from moiety_placement.placement import EMPTY, Placement


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """`lost_LE`: the experts that had their only replicas on ranks that died. The placement's slots there are empty."""

    placement: Placement
    lost_LE: NDArray[np.bool_]


def without(placement: Placement, ranks: Collection[int]) -> Survivors:
    """The placement with these ranks' slots empty, so that no token is dealt to them. What is lost comes back by
    `rebalance`, and what a rank that came back shall hold by `plan`. Raises BadNumbers for ranks that are not, or if
    they are all."""
    dead = sorted(set(ranks))
    if dead and not 0 <= dead[0] <= dead[-1] < placement.num_ranks:
        raise BadNumbers(f"ranks are 0 to {placement.num_ranks - 1}, not {dead[0]} to {dead[-1]}")
    if len(dead) == placement.num_ranks:
        raise BadNumbers(f"all {placement.num_ranks} ranks are dead: nothing remains to be placed")
    gone_R = np.isin(placement.rank_R, dead)
    left = Placement.of(
        np.where(gone_R, EMPTY, placement.physical_to_logical_LR),
        num_experts=placement.num_experts,
        num_ranks=placement.num_ranks,
        num_nodes=placement.num_nodes,
    )
    return Survivors(left, (placement.counts_LE > 0) & (left.counts_LE == 0))

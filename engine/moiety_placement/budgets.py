"""Division of a total number of replicas over the layers, after CRAFT.

CRAFT observes that layers gain differently from replicas: a layer whose experts are used evenly gains nothing, one with
a few hot experts gains a lot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from moiety_placement.errors import BadNumbers
from moiety_placement.placement_planner import plan
from moiety_placement.placement_table import Floats, Ints, check_divides, check_load, rank_loads


def replica_budgets(
    load_LE: ArrayLike,
    *,
    total_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    most_replicas: int | None = None,
) -> Ints:
    """Return [L]: the replicas of each layer that minimize the sum over layers of the largest rank load.

    Each is a multiple of `num_ranks`, together at most `total_replicas`; for `plan`, which is tried here on every
    number that a layer may get.

    `most_replicas`: maximum per layer, by default twice the least. A rank reserves as many slots as the layer with the
    most needs. Raises BadLoad or BadNumbers.
    """
    loads = check_load(load_LE)
    num_layers, num_experts = loads.shape
    least = -(-num_experts // num_ranks) * num_ranks
    most = 2 * least if most_replicas is None else most_replicas
    check_divides(num_ranks, total_replicas, "ranks", "replicas in all")
    check_divides(num_ranks, most, "ranks", "replicas of the layer that has most")
    if most < least or total_replicas < num_layers * least:
        raise BadNumbers(
            f"{num_layers} layers of {num_experts} experts on {num_ranks} ranks need {num_layers * least} "
            f"replicas in total and at least {least} slots in a layer; there are {total_replicas} "
            f"replicas and {most} slots"
        )
    largest_LB = []
    for replicas in range(least, most + 1, num_ranks):
        tried = plan(loads, num_replicas=replicas, num_groups=num_groups, num_nodes=num_nodes, num_ranks=num_ranks)
        largest_LB.append(rank_loads(tried, loads).max(axis=1))
    spare = total_replicas // num_ranks - num_layers * (least // num_ranks)
    return np.asarray(least + num_ranks * _spend(np.stack(largest_LB, axis=1), spare))


def _spend(largest_LB: Floats, spare: int) -> Ints:
    """Return [L]: the number of `spare` steps for each layer that minimizes the sum of the reached loads.

    The solution is exact, since a layer's second step may gain more than its first.
    """
    num_layers, num_levels = largest_LB.shape
    spare = min(spare, num_layers * (num_levels - 1))
    reached = np.zeros(spare + 1)  # smallest sum of the layers so far, by steps spent
    taken_LP = np.zeros((num_layers, spare + 1), dtype=np.int64)
    for layer, largest_B in enumerate(largest_LB):
        sums = np.full((num_levels, spare + 1), np.inf)
        for level in range(min(num_levels, spare + 1)):
            sums[level, level:] = reached[: spare + 1 - level] + largest_B[level]
        taken_LP[layer], reached = sums.argmin(axis=0), sums.min(axis=0)
    steps_L = np.zeros(num_layers, dtype=np.int64)
    left = spare
    for layer in reversed(range(num_layers)):
        steps_L[layer] = taken_LP[layer, left]
        left -= int(steps_L[layer])
    return steps_L

"""Effect of an expert placement on the experts' load. Pure, based on `moiety_placement`.

Before: each rank holds the same number of experts, in their order. After: the plan, with replicas of some experts.
"""

from __future__ import annotations

import numpy as np

from moiety_placement.matching import keep_in_place, moves
from moiety_placement.placement_planner import plan
from moiety_placement.placement_table import EMPTY, Floats, Placement, balancedness, rank_loads
from moiety_platform.experts.plan_schemas import PlanRequest, PlanView
from moiety_platform.experts.sums import LoadSum


def what_if(load: LoadSum, plan_request: PlanRequest) -> PlanView:
    """Return the plan for this load, compared with the state without a plan."""
    picks_LE = np.array(load.picks_by_layer, dtype=np.float64)
    num_experts = load.first.num_experts
    ranks = plan_request.nodes * plan_request.ranks_per_node
    slots = -(-(num_experts + plan_request.redundant_experts) // ranks) * ranks
    before = _in_order(len(picks_LE), num_experts, ranks, slots)
    groups = load.first.num_groups
    planned = plan(picks_LE, num_replicas=slots, num_groups=groups, num_nodes=plan_request.nodes, num_ranks=ranks)
    after = keep_in_place(planned, before)
    moved = int(moves(before, after).sum())
    return PlanView(
        model=plan_request.model,
        layers=list(load.first.layers),
        ranks=ranks,
        nodes=plan_request.nodes,
        slots_per_rank=slots // ranks,
        tokens=load.tokens,
        balancedness_before=round(balancedness(before, picks_LE), 4),
        balancedness_after=round(balancedness(after, picks_LE), 4),
        by_layer_before=_by_layer(before, picks_LE),
        by_layer_after=_by_layer(after, picks_LE),
        replicas=after.counts_LE.tolist(),
        moved_experts=moved,
        moved_bytes=moved * load.first.expert_bytes,
    )


def _in_order(num_layers: int, num_experts: int, ranks: int, slots: int) -> Placement:
    """Return the experts in the order of their numbers, evenly over the ranks; the remaining slots are empty."""
    row_GS = np.full((ranks, slots // ranks), EMPTY)
    each = -(-num_experts // ranks)
    experts = np.arange(num_experts)
    row_GS[experts // each, experts % each] = experts
    return Placement.of([row_GS.ravel()] * num_layers, num_experts=num_experts, num_ranks=ranks)


def _by_layer(placement: Placement, picks_LE: Floats) -> list[float]:
    loads_LG = rank_loads(placement, picks_LE)
    largest_L = np.maximum(loads_LG.max(axis=1), 1)
    found: list[float] = (loads_LG.mean(axis=1) / largest_L).round(4).tolist()
    return found

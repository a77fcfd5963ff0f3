"""Plan from expert loads alone: DeepSeek's EPLB as the start, then improved.

Where the nodes divide the groups of experts, a group stays in one node, so that group-limited routing stays in few
nodes: groups are packed into nodes, replicas are made within each node and packed into its ranks. Otherwise, the plan
treats everything as one node with one group. Exchanges between the heaviest rank and others improve the greedy start; a
layer that is then still far from the optimum is tried again with other numbers of replicas and other groups in a node,
and the best is kept. So the largest load of a layer never exceeds that of the greedy start.

Dimensions besides the package's: Q groups, I experts or groups of a node, X layers × nodes, P replicas of a node, A the
layers that are tried again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from moiety_placement.errors import BadNumbers
from moiety_placement.improvement import improve, improve_by_swaps
from moiety_placement.packing import pack, replicate
from moiety_placement.placement_state import PlacementState
from moiety_placement.placement_table import EMPTY, Floats, Ints, Placement, check_divides, check_load

_HEAD_START = 1.0  # of the last try
_NEAR = 1.001  # times the lower bound of the largest load: not worth another try
_SWAP_ROUNDS, _STEP_ROUNDS = 64, 12


def plan(
    load_LE: ArrayLike,
    *,
    num_replicas: int | Sequence[int] | Ints,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
) -> Placement:
    """Place each layer's replicas so that the ranks have equal load.

    `load_LE`: use of each expert of each layer, in any unit. `num_replicas`: slots of a layer, a multiple of
    `num_ranks` and at least E; or one number per layer (`replica_budgets`), where a layer's missing slots are -1.
    `num_groups`: groups of experts that are chosen together, 1 if there are none; it divides E. `num_nodes` divides
    `num_ranks`. Raises BadLoad or BadNumbers.
    """
    loads = check_load(load_LE)
    num_layers, num_experts = loads.shape
    check_divides(num_groups, num_experts, "groups", "experts")
    check_divides(num_nodes, num_ranks, "nodes", "ranks")
    replicas_L = _replicas_by_layer(num_replicas, num_layers, num_experts, num_ranks)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    slots_LGS = np.full((num_layers, num_ranks, int(replicas_L.max()) // num_ranks), EMPTY, dtype=np.int64)
    for replicas in np.unique(replicas_L).tolist():
        of_L = np.flatnonzero(replicas_L == replicas)
        slots = _solve(loads[of_L], replicas, num_groups, num_nodes, num_ranks)
        slots_LGS[of_L, :, : replicas // num_ranks] = slots.reshape(len(of_L), num_ranks, -1)
    return Placement.of(
        slots_LGS.reshape(num_layers, -1), num_experts=num_experts, num_ranks=num_ranks, num_nodes=num_nodes
    )


def _solve(load_LE: Floats, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int) -> Ints:
    """Return [L, R]: the expert of each slot."""
    every_L = np.arange(len(load_LE))
    homes = list(_homes(load_LE, num_groups, num_nodes))
    start = _greedy(load_LE, homes[0], num_replicas, num_ranks, head_start=0.0)
    board = PlacementState.of(start, load_LE, num_ranks, num_nodes)
    floor_L = _floor(board, homes[-1])
    improve_by_swaps(board, every_L, _SWAP_ROUNDS)
    others = [(home, 0.0) for home in homes[1:]] + [(homes[-1], _HEAD_START)]
    for home, head_start in others:
        far_A = np.flatnonzero(board.largest_loads() > _NEAR * floor_L)
        if len(far_A):
            again = _greedy(load_LE[far_A], home[far_A], num_replicas, num_ranks, head_start)
            other = PlacementState.of(again, load_LE[far_A], num_ranks, num_nodes)
            improve_by_swaps(other, np.arange(len(far_A)), _SWAP_ROUNDS)
            _keep_better(board, other, far_A)
    improve(board, np.flatnonzero(board.largest_loads() > _NEAR * floor_L), _STEP_ROUNDS)
    return board.slots_LR


def _homes(load_LE: Floats, num_groups: int, num_nodes: int) -> Iterator[Ints]:
    """Yield [L, N, E / N]: the experts of each node, with groups packed greedily.

    Yields a second time, improved by exchanges of groups between nodes, where these are possible.
    """
    num_layers, num_experts = load_LE.shape
    by_group_QI = np.arange(num_experts).reshape(num_groups, -1)
    load_LQ = load_LE.reshape(num_layers, num_groups, -1).sum(axis=2)
    groups_LNI = pack(load_LQ, num_nodes)
    yield by_group_QI[groups_LNI].reshape(num_layers, num_nodes, -1)
    if 1 < num_nodes < num_groups:
        board = PlacementState.of(groups_LNI.reshape(num_layers, -1), load_LQ, num_ranks=num_nodes, num_nodes=1)
        improve_by_swaps(board, np.arange(num_layers), _SWAP_ROUNDS)
        yield by_group_QI[board.slots_LR].reshape(num_layers, num_nodes, -1)


def _greedy(load_LE: Floats, home_LNI: Ints, num_replicas: int, num_ranks: int, head_start: float) -> Ints:
    """Return [L, R]: replicas made within each node and packed into its ranks."""
    num_layers, num_nodes, num_homed = home_LNI.shape
    home_XI = home_LNI.reshape(-1, num_homed)
    load_XI = np.take_along_axis(load_LE, home_LNI.reshape(num_layers, -1), axis=1).reshape(home_XI.shape)
    counts_XI = replicate(load_XI, num_replicas // num_nodes, head_start)
    places_X = np.tile(np.arange(num_homed), len(home_XI))
    held_XP = np.repeat(places_X, counts_XI.ravel()).reshape(len(home_XI), -1)
    packed_XP = pack(np.take_along_axis(load_XI / counts_XI, held_XP, axis=1), num_ranks // num_nodes)
    held_XP = np.take_along_axis(held_XP, packed_XP.reshape(held_XP.shape), axis=1)
    return np.take_along_axis(home_XI, held_XP, axis=1).reshape(num_layers, num_replicas)


def _floor(board: PlacementState, home_LNI: Ints) -> Floats:
    """Return [L]: an approximate lower bound of the largest load for these nodes' experts.

    It is the mean of the fullest node's ranks, or the largest replica.
    """
    num_layers, num_nodes, _ = home_LNI.shape
    load_LN = np.take_along_axis(board.load_LE, home_LNI.reshape(num_layers, -1), axis=1)
    means_LN = load_LN.reshape(num_layers, num_nodes, -1).sum(axis=2) / (board.num_ranks // num_nodes)
    return np.asarray(np.maximum(means_LN.max(axis=1), (board.load_LE / board.counts_LE).max(axis=1)))


def _keep_better(board: PlacementState, other: PlacementState, layers_A: Ints) -> None:
    better_A = other.largest_loads() < board.largest_loads()[layers_A]
    board.slots_LR[layers_A[better_A]] = other.slots_LR[better_A]
    board.counts_LE[layers_A[better_A]] = other.counts_LE[better_A]


def _replicas_by_layer(
    num_replicas: int | Sequence[int] | Ints, num_layers: int, num_experts: int, num_ranks: int
) -> Ints:
    given = np.asarray(num_replicas)
    if given.shape not in {(), (num_layers,)} or not np.issubdtype(given.dtype, np.integer):
        raise BadNumbers(f"the number of replicas must be one integer, or one for each of {num_layers} layers")
    for replicas in np.unique(given).tolist():
        check_divides(num_ranks, replicas, "ranks", "replicas")
        if replicas < num_experts:
            least = -(-num_experts // num_ranks) * num_ranks
            raise BadNumbers(f"{replicas} replicas cannot hold {num_experts} experts: at least {least} are needed")
    return np.broadcast_to(given, num_layers).astype(np.int64)

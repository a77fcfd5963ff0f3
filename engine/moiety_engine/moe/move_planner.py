"""Planning of the moves that lead some layers to a better placement of their experts.

A plan is a pure function of its request. `InlinePlanner` computes it at once; `planner_process` computes it in another
process, beside the steps.

L layers of the request, E experts, R slots of a layer.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from moiety_placement.placement_table import Placement
from moiety_placement.rebalancing import rebalance
from moiety_placement.transition import Write, transition


class PlanRequest(msgspec.Struct, frozen=True, array_like=True):
    """Placement and load of some layers. `slots` are int64 [L, R], `load` is int64 [L, E].

    `move_cost` is the parameter of `rebalance`, and `most_writes` that of `transition`.
    """

    num_layers: int
    num_experts: int
    num_ranks: int
    slots: bytes
    load: bytes
    move_cost: float
    most_writes: int

    @staticmethod
    def of(old: Placement, load_LE: np.ndarray, move_cost: float, most_writes: int) -> PlanRequest:
        slots_LR = np.ascontiguousarray(old.physical_to_logical_LR, dtype=np.int64)
        load = np.ascontiguousarray(load_LE, dtype=np.int64).tobytes()
        shape = old.num_layers, old.num_experts, old.num_ranks
        return PlanRequest(*shape, slots_LR.tobytes(), load, move_cost, most_writes)


class PlannedMove(msgspec.Struct, frozen=True, array_like=True):
    """Writes that are applied together to one layer, an index among those of the request."""

    layer: int
    writes: list[Write]


class PlanFailed(Exception):
    """A plan could not be computed."""


class PlacementPlanner(Protocol):
    """Planner of one request at a time."""

    def begin(self, request: PlanRequest) -> None:
        """Begin to plan. The result of the request before must have been taken."""
        ...

    def take(self) -> list[PlannedMove] | None:
        """Return the moves of the request, the layer with the most gain first; None while they are computed.

        Raises PlanFailed; another request may then begin.
        """
        ...

    def close(self) -> None:
        """Release what the planner holds. A plan that is being computed is discarded."""
        ...


class InlinePlanner:
    """Planner that computes the plan in `begin`, in the thread of the caller."""

    def __init__(self) -> None:
        self._moves: list[PlannedMove] | None = None

    def begin(self, request: PlanRequest) -> None:
        """Compute the plan."""
        self._moves = compute_plan(request)

    def take(self) -> list[PlannedMove] | None:
        """Return the moves."""
        moves, self._moves = self._moves, None
        return moves

    def close(self) -> None:
        """Nothing to release."""


def compute_plan(request: PlanRequest) -> list[PlannedMove]:
    """Return the moves of the layers that are worth it. Raises the errors of `rebalance`."""
    num_layers = request.num_layers
    slots_LR = np.frombuffer(request.slots, dtype=np.int64).reshape(num_layers, -1)
    load_LE = np.frombuffer(request.load, dtype=np.int64).reshape(num_layers, request.num_experts)
    old = Placement.of(slots_LR, num_experts=request.num_experts, num_ranks=request.num_ranks)
    done = rebalance(old, load_LE, move_cost=request.move_cost)
    return [
        PlannedMove(layer, writes)
        for layer in done.order
        for writes in transition(old, done.placement, layer, most_writes=request.most_writes)
    ]

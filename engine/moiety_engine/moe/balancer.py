"""Expert load balancer: decides from the expert load since the last decision when and where experts move between ranks.

It handles no tensors and knows ranks as numbers only; the caller that takes a move executes it, and reports when the
move is complete.

L layers with experts, E experts, R slots of a layer.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import structlog

from moiety_engine.moe.move_planner import InlinePlanner, PlacementPlanner, PlanFailed, PlanRequest
from moiety_placement.placement_table import Placement, balancedness, rank_loads
from moiety_placement.transition import transition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moiety_placement.transition import Write

MIN_PICKS = 64  # mean picks per expert that a decision needs: with few tokens, load is uneven by chance alone
_LAYERS_AT_ONCE = 4  # layers of a plan, so that the first ones move before the last ones are planned

log = structlog.get_logger()


class Balancer:
    """Owner of the expert placement, as of the moves completed so far, and of the moves that remain.

    Every `every_s` seconds it evaluates the picks since the last evaluation, if there are enough, and moves the layers
    to the placement that `rebalance` computes from them, the most uneven layers first. `most_writes`: approximate
    number of slots that one move writes. `planner`: None plans in the thread of the caller.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        every_s: float,
        most_writes: int,
        now_s: float,
        planner: PlacementPlanner | None = None,
    ) -> None:
        self._of_shape = placement
        self._slots_LR = placement.physical_to_logical_LR.copy()
        self._every_s, self._most_writes, self._due_s = every_s, most_writes, now_s + every_s
        self._picks_LE = np.zeros((placement.num_layers, placement.num_experts), dtype=np.int64)
        self._load_LE = self._picks_LE.copy()  # picks times the weights of their classes
        self._evaluated_LE = self._load_LE  # load that the current plan is based on
        self._waiting: list[int] = []  # layers to be planned
        self._planned: list[int] = []  # layers that the planner plans
        self._planner = InlinePlanner() if planner is None else planner
        self._moves: deque[tuple[int, list[Write]]] = deque()
        self._taken: tuple[int, list[Write]] | None = None  # the move that is being executed
        self._move_cost = 0.0
        self._has_moved = False  # since the last completed rebalancing
        self.rebalances_total = 0
        self.balancedness = self.balancedness_planned = 1.0  # of ranks: before and after the last rebalancing

    @property
    def placement(self) -> Placement:
        return self._placement_of(range(len(self._slots_LR)))

    @property
    def is_moving(self) -> bool:
        return bool(self._moves or self._waiting or self._planned or self._taken)

    def count(self, picks_LE: np.ndarray, load_LE: np.ndarray | None = None) -> None:
        """Add the picks of the experts, [L, E], to the load of the current interval.

        `load_LE` is the load that experts are placed by, where picks of some classes weigh more; None: the picks.
        Whether there are enough for an evaluation depends on the picks.
        """
        self._picks_LE += picks_LE
        self._load_LE += picks_LE if load_LE is None else load_LE

    def aim(self, layer: int, slots_R: np.ndarray) -> None:
        """Queue the moves that give a layer the experts `slots_R` in its slots.

        `layer` is an index among the layers with experts; the layer must have no open moves.
        """
        old = self._placement_of([layer])
        new = Placement.of([slots_R], num_experts=old.num_experts, num_ranks=old.num_ranks)
        self._moves.extend((layer, batch) for batch in transition(old, new, 0, most_writes=self._most_writes))

    def evaluate(self, now_s: float, move_cost: float) -> bool:
        """Find the layers that are worth moving, if an evaluation is due and there are enough picks.

        `move_cost` is the parameter of `rebalance`. Returns whether it evaluated the load.
        """
        if now_s < self._due_s or self.is_moving:
            return False
        self._due_s = now_s + self._every_s
        if self._picks_LE.sum(axis=1).min() < MIN_PICKS * self._of_shape.num_experts:
            return False
        self._evaluated_LE, self._load_LE = self._load_LE, np.zeros_like(self._load_LE)
        self._picks_LE = np.zeros_like(self._picks_LE)
        loads_LG = rank_loads(self.placement, self._evaluated_LE)
        uneven_L = loads_LG.max(axis=1) / loads_LG.mean(axis=1) - 1
        self._waiting = [
            layer for layer in np.argsort(-uneven_L, kind="stable").tolist() if uneven_L[layer] > move_cost
        ]
        self._move_cost = move_cost
        self.balancedness = self.balancedness_planned = balancedness(self.placement, self._evaluated_LE)
        return True

    def next_move(self) -> tuple[int, list[Write]] | None:
        """Return the next layer, an index as in `aim`, and the writes to apply to it together.

        Returns None if no move is ready. Each move must be completed or cancelled before the next one is taken.
        """
        assert self._taken is None, "a move is taken while another one is executed"
        if not self._moves and (self._waiting or self._planned):
            self._plan()
        self._taken = self._moves.popleft() if self._moves else None
        self._end_rebalancing()
        return self._taken

    def complete_move(self) -> None:
        """Count the move taken last as done: the slots hold the experts."""
        assert self._taken is not None, "no move is executed"
        layer, writes = self._taken
        self._slots_LR[layer, [one.slot for one in writes]] = [one.expert for one in writes]
        self._taken, self._has_moved = None, True
        self._end_rebalancing()

    def cancel_moves(self) -> None:
        """Discard the move taken last and those that remain: the slots hold what they held before."""
        self._taken, self._waiting = None, []
        self._moves.clear()
        self._end_rebalancing()

    def close(self) -> None:
        """Release the planner."""
        self._planner.close()

    def _end_rebalancing(self) -> None:
        if self._has_moved and not self.is_moving:
            self._has_moved = False
            self.rebalances_total += 1
            self.balancedness_planned = balancedness(self.placement, self._evaluated_LE)

    def _plan(self) -> None:
        """Begin to plan the next few waiting layers, or take the moves that are planned."""
        if not self._planned:
            self._planned, self._waiting = self._waiting[:_LAYERS_AT_ONCE], self._waiting[_LAYERS_AT_ONCE:]
            old, load_LE = self._placement_of(self._planned), self._evaluated_LE[self._planned]
            self._planner.begin(PlanRequest.of(old, load_LE, self._move_cost, self._most_writes))
        try:
            moves = self._planner.take()
        except PlanFailed as exc:
            log.warning("expert_plan_failed", reason=str(exc), advice="experts stay where they are until the next plan")
            moves, self._waiting = [], []
        if moves is not None:
            self._moves.extend((self._planned[one.layer], one.writes) for one in moves)
            self._planned = []

    def _placement_of(self, layers: Sequence[int]) -> Placement:
        shape = self._of_shape
        slots_LR = self._slots_LR[list(layers)]
        return Placement.of(slots_LR, num_experts=shape.num_experts, num_ranks=shape.num_ranks)

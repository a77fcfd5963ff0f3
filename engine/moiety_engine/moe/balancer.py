"""When experts move to other ranks, and where to, from what they had to do since that was last judged. Knows no
tensors, and ranks as numbers only: whoever takes a move makes it.

L layers with experts, E experts, R slots of a layer.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from moiety_placement.placement import Placement, balancedness, rank_loads
from moiety_placement.rebalancing import rebalance
from moiety_placement.transition import transition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moiety_placement.transition import Write

LEAST_PICKS = 64  # of an expert, on average: of few tokens no load is even, by chance alone
_LAYERS_AT_ONCE = 4  # are planned between two steps, which takes some milliseconds


class Balancer:
    """Owns where the experts are as of the moves that were taken, and what is to move yet. Every `every_s` it looks at
    the picks since the last look, if they are enough, and leads the layers to what `rebalance` makes of them, the most
    uneven ones first. `most_writes`: slots that one move writes, about."""

    def __init__(self, placement: Placement, *, every_s: float, most_writes: int, now_s: float) -> None:
        self._of_shape = placement
        self._slots_LR = placement.physical_to_logical_LR.copy()
        self._every_s, self._most_writes, self._due_s = every_s, most_writes, now_s + every_s
        self._picks_LE = np.zeros((placement.num_layers, placement.num_experts), dtype=np.int64)
        self._judged_LE = self._picks_LE  # what the layers that are planned now had to do
        self._waiting: list[int] = []  # layers to be planned
        self._moves: deque[tuple[int, list[Write]]] = deque()
        self._move_cost = 0.0
        self._has_moved = False  # since experts were last where they should be
        self.rebalances_total = 0
        self.balancedness = self.balancedness_planned = 1.0  # of ranks: in what was judged last, and by what it led to

    @property
    def placement(self) -> Placement:
        return self._placement_of(range(len(self._slots_LR)))

    @property
    def is_moving(self) -> bool:
        return bool(self._moves or self._waiting)

    def count(self, picks_LE: np.ndarray) -> None:
        """What the experts had to do."""
        self._picks_LE += picks_LE

    def aim(self, layer: int, slots_R: np.ndarray) -> None:
        """Lead a layer, counted among those with experts, that no move is open for, to other slots."""
        old = self._placement_of([layer])
        new = Placement.of([slots_R], num_experts=old.num_experts, num_ranks=old.num_ranks)
        self._moves.extend((layer, batch) for batch in transition(old, new, 0, most_writes=self._most_writes))

    def judge(self, now_s: float, move_cost: float) -> bool:
        """If it is time, and there is enough to judge by, find the layers that are worth a move, `move_cost` being that
        of `rebalance`. Returns whether it did."""
        if now_s < self._due_s or self.is_moving:
            return False
        self._due_s = now_s + self._every_s
        if self._picks_LE.sum(axis=1).min() < LEAST_PICKS * self._of_shape.num_experts:
            return False
        self._judged_LE, self._picks_LE = self._picks_LE, np.zeros_like(self._picks_LE)
        loads_LG = rank_loads(self.placement, self._judged_LE)
        uneven_L = loads_LG.max(axis=1) / loads_LG.mean(axis=1) - 1
        self._waiting = [
            layer for layer in np.argsort(-uneven_L, kind="stable").tolist() if uneven_L[layer] > move_cost
        ]
        self._move_cost = move_cost
        self.balancedness = self.balancedness_planned = balancedness(self.placement, self._judged_LE)
        return True

    def next_move(self) -> tuple[int, list[Write]] | None:
        """The layer, counted as above, and what is to be written in it now, all at once; None if nothing is, or not
        yet."""
        if not self._moves and self._waiting:
            self._plan()
        move = self._moves.popleft() if self._moves else None
        if move is not None:
            layer, writes = move
            self._slots_LR[layer, [one.slot for one in writes]] = [one.expert for one in writes]
            self._has_moved = True
        if self._has_moved and not self.is_moving:
            self._has_moved = False
            self.rebalances_total += 1
            self.balancedness_planned = balancedness(self.placement, self._judged_LE)
        return move

    def _plan(self) -> None:
        """The next few layers."""
        layers, self._waiting = self._waiting[:_LAYERS_AT_ONCE], self._waiting[_LAYERS_AT_ONCE:]
        done = rebalance(self._placement_of(layers), self._judged_LE[layers], move_cost=self._move_cost)
        for place in done.order:
            self.aim(layers[place], done.placement.physical_to_logical_LR[place])

    def _placement_of(self, layers: Sequence[int]) -> Placement:
        shape = self._of_shape
        slots_LR = self._slots_LR[list(layers)]
        return Placement.of(slots_LR, num_experts=shape.num_experts, num_ranks=shape.num_ranks)

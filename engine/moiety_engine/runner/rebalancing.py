"""Rebalancing of experts among the ranks while the engine serves.

It counts the experts' load, and between two steps makes at most one move, the same on all ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from moiety_engine.moe.balancer import Balancer
from moiety_engine.runner.control_messages import MoveExperts
from moiety_placement.placement_table import Placement
from moiety_wire.experts import pack_counts

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.moe.load_watch import PlacementLoad
    from moiety_engine.moe.shape import ExpertShape
    from moiety_engine.runner.control_messages import ControlSender
    from moiety_placement.transition import Write
    from moiety_wire.experts import ExpertLoad

log = structlog.get_logger()

MOVE_BYTES = 64 << 20  # most bytes moved between two steps; at least one expert's weights
MIN_MOVE_COST = 0.006  # lower bound of a move's cost, in mean rank loads: below it, many moves gain little
_BYTES_PER_S = 1e9  # assumed link speed, until one is measured
_NEWEST = 0.2  # weight of the last measurement in the mean


class Rebalancing:
    """Expert rebalancing on rank 0. Used by the step loop's thread only."""

    def __init__(
        self, model: Transformer, controls: ControlSender, shape: ExpertShape, every_s: float, now_s: float
    ) -> None:
        self._model, self._controls, self._shape = model, controls, shape
        layout = model.ranks.rank_position.layout
        at_start = layout.slots(shape.num_placed)  # initial slots, assumed for layers of other stages
        tables = map(model.slots_of, shape.layers)
        slots_LR = [at_start if one is None else one.placement.physical_to_logical_LR[0].tolist() for one in tables]
        placement = Placement.of(slots_LR, num_experts=shape.num_placed, num_ranks=layout.ep)
        self._slots_of_part = len(at_start) // layout.ep
        self._piece_bytes = max(1, shape.expert_bytes // model.ranks.rank_position.expert_cuts)
        most_writes = max(1, MOVE_BYTES // self._piece_bytes)
        self.balancer = Balancer(placement, every_s=every_s, most_writes=most_writes, now_s=now_s)
        self.moved_bytes_total = 0  # moved from rank to rank
        self._bytes_per_s = _BYTES_PER_S
        self._busy_s = 0.0  # spent on steps since the load was last evaluated
        self._updated_s = now_s

    def restart_clock(self, now_s: float) -> None:
        """Restart the clock after the engine slept, so that the sleep does not count as work."""
        self._updated_s = now_s

    def update(self, now_s: float, load: PlacementLoad | None, *, worked: bool) -> None:
        """Process the expert counts since the last call and make the next move. Call it between steps.

        `worked` says whether a step ran since the last call.
        """
        self._busy_s += max(0.0, now_s - self._updated_s) if worked else 0.0
        self._updated_s = now_s
        if load is not None:
            placed = self._shape.num_placed
            self.balancer.count(load.picks_LE[:, :placed], load.weighted_LE[:, :placed])
        if self.balancer.evaluate(now_s, self._move_cost()):
            self._busy_s = 0.0
        before, move = self.balancer.rebalances_total, self.balancer.next_move()
        if move is not None:
            self._make(*move)
        if self.balancer.rebalances_total > before:
            self._log_figures()

    def metrics(self) -> dict[str, Any]:
        """Return the rebalancing fields of CoreLoad."""
        return {
            "rebalances_total": self.balancer.rebalances_total,
            "moved_expert_bytes_total": self.moved_bytes_total,
            "rank_balancedness": self.balancer.balancedness,
            "rank_balancedness_planned": self.balancer.balancedness_planned,
        }

    def with_places(self, load: ExpertLoad) -> ExpertLoad:
        """Return the load with the current placement of the experts."""
        placed = self.balancer.placement
        slots_LR = pack_counts(placed.physical_to_logical_LR.ravel().tolist())
        return msgspec.structs.replace(load, num_parts=placed.num_ranks, slots_LR=slots_LR)

    def _make(self, layer: int, writes: list[Write]) -> None:
        of_all = self._shape.layers[layer]
        self._controls.send(MoveExperts(of_all, writes))
        begin_s = time.perf_counter()
        own_bytes = self._model.move_experts(of_all, writes)
        if own_bytes:  # a rank that takes no part returns at once
            speed = own_bytes / (time.perf_counter() - begin_s)
            self._bytes_per_s += _NEWEST * (speed - self._bytes_per_s)
        of_part = self._slots_of_part
        self.moved_bytes_total += self._shape.expert_bytes * sum(
            one.slot // of_part != one.source // of_part for one in writes
        )

    def _move_cost(self) -> float:
        """Return the cost of moving one expert's weights, relative to a layer's time since the last evaluation.

        That time predicts the layer's time until the next evaluation if nothing changes.
        """
        layer_s = self._busy_s / len(self._shape.layers)
        return max(MIN_MOVE_COST, self._piece_bytes / self._bytes_per_s / max(layer_s, 1e-9))

    def _log_figures(self) -> None:
        metrics = {name: round(value, 4) for name, value in self.metrics().items()}
        log.info("experts_rebalanced", **metrics)


def rebalancing_of(
    model: Transformer, config: EngineConfig, controls: ControlSender, now_s: float
) -> Rebalancing | None:
    """Return the rebalancing of this replica; None where experts do not move."""
    every_s, shape = config.rebalanced_every_s, model.experts
    # a single rank may remain after rank exclusion
    if not every_s or shape is None or model.ranks.rank_position.layout.ep == 1:
        return None
    return Rebalancing(model, controls, shape, every_s, now_s)

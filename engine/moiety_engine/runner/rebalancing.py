"""Rebalancing of experts among the ranks while the engine serves.

It counts the experts' load, has moves planned, and executes one move at a time. In asynchronous mode, plans and
transfers run beside the steps, and only the switch of slots takes place between two steps; in blocking mode, all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from moiety_engine.moe.balancer import Balancer
from moiety_engine.moe.planner_process import PlannerProcess
from moiety_engine.runner.expert_messages import BeginExpertMove, EndExpertMove
from moiety_engine.runner.expert_transfers import ExpertTransfers, TransferRefused
from moiety_placement.placement_table import Placement
from moiety_wire.engine_choices import RebalanceMode
from moiety_wire.experts import pack_counts

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig
    from moiety_engine.distribution.collectives import TransferGroup
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.moe.load_watch import PlacementLoad
    from moiety_engine.moe.shape import ExpertShape
    from moiety_engine.runner.control_messages import ControlSender
    from moiety_placement.transition import Write
    from moiety_wire.experts import ExpertLoad

log = structlog.get_logger()

MOVE_BYTES = {  # most bytes of one move on a rank; at least one expert's weights
    RebalanceMode.ASYNC: 16 << 20,  # which are copied between two steps
    RebalanceMode.BLOCKING: 64 << 20,
}
MIN_MOVE_COST = 0.006  # lower bound of a move's cost, in mean rank loads: below it, many moves gain little
_BYTES_PER_S = 1e9  # assumed link speed, until one is measured
_NEWEST = 0.2  # weight of the last measurement in the mean


@dataclass(frozen=True, slots=True)
class _Move:
    """Move under way. `layer` is an index over all layers, `adapter_changes` that of AdapterStacks at its begin."""

    layer: int
    writes: list[Write]
    adapter_changes: int


class Rebalancing:
    """Expert rebalancing on rank 0. Used by the step loop's thread only."""

    def __init__(
        self,
        model: Transformer,
        controls: ControlSender,
        shape: ExpertShape,
        group: TransferGroup,
        *,
        every_s: float,
        mode: RebalanceMode,
        now_s: float,
    ) -> None:
        self._model, self._controls, self._shape, self._mode = model, controls, shape, mode
        self._every_s = every_s
        self._planner = PlannerProcess() if mode is RebalanceMode.ASYNC else None
        self._slots_of_part = self._piece_bytes = 1
        self.balancer = self._new_balancer(now_s)
        self._transfers = ExpertTransfers(model, group)
        self._under_way: _Move | None = None
        self._has_stopped = False  # the connections between the ranks' threads are broken
        self.moved_bytes_total = 0  # moved from rank to rank
        self.failed_moves_total = 0
        self._bytes_per_s = _BYTES_PER_S
        self._busy_s = 0.0  # spent on steps since the load was last evaluated
        self._updated_s = now_s

    def restart(self, now_s: float) -> None:
        """Begin anew with the placement of another layout of ranks. No move may be under way."""
        before = self.balancer
        before.close()  # it may have a plan of the layout of before
        self.balancer = self._new_balancer(now_s)
        self.balancer.rebalances_total = before.rebalances_total
        self.balancer.balancedness = before.balancedness
        self.balancer.balancedness_planned = before.balancedness_planned
        self._busy_s = 0.0

    def _new_balancer(self, now_s: float) -> Balancer:
        model, shape = self._model, self._shape
        layout = model.ranks.rank_position.layout
        at_start = layout.slots(shape.num_placed)  # initial slots, assumed for layers of other stages
        tables = map(model.slots_of, shape.layers)
        slots_LR = [at_start if one is None else one.placement.physical_to_logical_LR[0].tolist() for one in tables]
        placement = Placement.of(slots_LR, num_experts=shape.num_placed, num_ranks=layout.ep)
        self._slots_of_part = len(at_start) // layout.ep
        self._piece_bytes = max(1, shape.expert_bytes // model.ranks.rank_position.expert_cuts)
        most_writes = max(1, MOVE_BYTES[self._mode] // self._piece_bytes)
        planner = self._planner
        return Balancer(placement, every_s=self._every_s, most_writes=most_writes, now_s=now_s, planner=planner)

    def restart_clock(self, now_s: float) -> None:
        """Restart the clock after the engine slept, so that the sleep does not count as work."""
        self._updated_s = now_s

    def update(self, now_s: float, load: PlacementLoad | None, *, worked: bool) -> None:
        """Process the expert counts since the last call, end the move that is complete, and begin the next one.

        Call it between steps. `worked` says whether a step ran since the last call.
        """
        self._busy_s += max(0.0, now_s - self._updated_s) if worked else 0.0
        self._updated_s = now_s
        if load is not None:
            placed = self._shape.num_placed
            self.balancer.count(load.picks_LE[:, :placed], load.weighted_LE[:, :placed])
        if self._has_stopped:
            return
        if self.balancer.evaluate(now_s, self._move_cost()):
            self._busy_s = 0.0
        before = self.balancer.rebalances_total
        if self._under_way is not None and self._transfers.is_done:
            self._end_move()
        if self._under_way is None and (move := self.balancer.next_move()) is not None:
            self._begin_move(*move)
            if self._mode is RebalanceMode.BLOCKING:
                self._end_move()
        if self.balancer.rebalances_total > before:
            self._log_figures()

    def finish_move(self) -> None:
        """Wait for the move under way, if there is one, and end it. Call it between steps, before weights change."""
        while self._under_way is not None:  # twice where adapters have changed since it began
            self._end_move()

    def close(self) -> None:
        """End the move under way, the thread and the process. All ranks must still execute control messages."""
        self.finish_move()
        self._transfers.close()
        self.balancer.close()

    def metrics(self) -> dict[str, Any]:
        """Return the rebalancing fields of CoreLoad."""
        return {
            "rebalances_total": self.balancer.rebalances_total,
            "moved_expert_bytes_total": self.moved_bytes_total,
            "failed_expert_moves_total": self.failed_moves_total,
            "rank_balancedness": self.balancer.balancedness,
            "rank_balancedness_planned": self.balancer.balancedness_planned,
        }

    def with_places(self, load: ExpertLoad) -> ExpertLoad:
        """Return the load with the current placement of the experts."""
        placed = self.balancer.placement
        slots_LR = pack_counts(placed.physical_to_logical_LR.ravel().tolist())
        return msgspec.structs.replace(load, num_parts=placed.num_ranks, slots_LR=slots_LR)

    def _begin_move(self, layer: int, writes: list[Write]) -> None:
        of_all = self._shape.layers[layer]
        self._under_way = _Move(of_all, writes, self._model.adapters.num_changes)
        self._controls.send(BeginExpertMove(of_all, writes))
        self._transfers.begin(of_all, writes)

    def _end_move(self) -> None:
        """Wait for the transfer and switch the slots on all ranks; where it failed, leave them as they are."""
        move = self._under_way
        assert move is not None, "no move is under way"
        self._under_way = None
        try:
            speed = self._transfers.wait()
        except (TransferRefused, RuntimeError) as exc:  # torch raises RuntimeError
            self._give_up(move, exc)
            return
        if self._model.adapters.num_changes != move.adapter_changes:  # the buffers have earlier factors of adapters
            self._end_on_all_ranks(commits=False)
            self._under_way = replace(move, adapter_changes=self._model.adapters.num_changes)
            self._controls.send(BeginExpertMove(move.layer, move.writes))
            self._transfers.begin(move.layer, move.writes)
            return
        self._end_on_all_ranks(commits=True)
        self.balancer.complete_move()
        if speed is not None:
            self._bytes_per_s += _NEWEST * (speed - self._bytes_per_s)
        of_part = self._slots_of_part
        self.moved_bytes_total += self._shape.expert_bytes * sum(
            one.slot // of_part != one.source // of_part for one in move.writes
        )

    def _give_up(self, move: _Move, exc: Exception) -> None:
        self._has_stopped = not isinstance(exc, TransferRefused)
        self.failed_moves_total += 1
        self._end_on_all_ranks(commits=False)
        self.balancer.cancel_moves()
        advice = "experts stay where they are until the next rebalancing; give the ranks more free memory"
        if self._has_stopped:
            advice = "experts stay where they are until the engine is restarted; check the links between the ranks"
        log.warning("expert_move_failed", layer=move.layer, reason=str(exc), advice=advice)

    def _end_on_all_ranks(self, *, commits: bool) -> None:
        self._controls.send(EndExpertMove(commits))
        self._transfers.end(commits=commits)

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
    every_s, shape, group = config.rebalanced_every_s, model.experts, model.ranks.transfers
    # a single rank may remain after rank exclusion
    if not every_s or shape is None or group is None or model.ranks.rank_position.layout.ep == 1:
        return None
    return Rebalancing(model, controls, shape, group, every_s=every_s, mode=config.rebalance_mode, now_s=now_s)

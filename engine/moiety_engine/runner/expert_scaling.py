"""Change of the number of expert ranks while the engine serves (elastic expert parallelism).

New ranks are started, and all ranks prepare the next layout, in the background: the expert ranks load the experts that
they will hold, and process groups are created. All ranks then switch between the same two steps, and removed ranks end.
Requests and their KV caches are on the other ranks and stay as they are.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import structlog

from moiety_engine.distribution.layout import RankPosition, expert_part, with_expert_ranks
from moiety_engine.distribution.rank_scaling import ScalingFailed, ScalingPreparation, adopt_groups
from moiety_engine.errors import InvalidConfig
from moiety_engine.runner.expert_messages import PrepareExpertRanks, SwitchExpertRanks
from moiety_wire.engine_choices import Offload

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_engine.config import EngineConfig
    from moiety_engine.distribution.layout import Layout
    from moiety_engine.distribution.rank_group import RankGroup
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.model.weights import ModelWeights
    from moiety_engine.runner.checkpoint_weights import PartLoader
    from moiety_engine.runner.control_messages import ControlSender

log = structlog.get_logger()


class ExpertScaling:
    """Number of expert ranks, on rank 0. Used by the step loop's thread only."""

    def __init__(
        self,
        model: Transformer,
        controls: ControlSender,
        config: EngineConfig,
        before_switch: Callable[[], None],
        load_part: PartLoader | None = None,
    ) -> None:
        """Create the owner. `before_switch` is called between steps before experts change their ranks.

        `load_part` loads the experts of a position while steps run; not needed on a single rank.
        """
        self._model, self._controls, self._config, self._before_switch = model, controls, config, before_switch
        self._load_part = load_part
        self._next_experts: list[ModelWeights] = []  # of this rank, if the next layout has no expert ranks
        self._preparation: ScalingPreparation | None = None
        self._next = self._layout
        self._joined = range(0)  # new ranks that exchange heartbeats with this one
        self._adapter_changes = self._generation = 0
        self._begun_s = 0.0
        self._can_change = self._may_change()
        self.requested_ranks = self._layout.ffn_ranks
        self.problem = ""  # why the last request failed
        self.scalings_total = self.failed_scalings_total = 0
        self.switch_seconds_total = 0.0  # time that steps waited for ranks that switched

    @property
    def is_under_way(self) -> bool:
        return self._preparation is not None

    def begin(self, num_ranks: int) -> None:
        """Begin to change the number of expert ranks to `num_ranks`. `problem` says why it is refused."""
        try:
            layout = self._checked(num_ranks)
        except InvalidConfig as exc:
            self.problem = str(exc)
            log.warning("expert_ranks_refused", requested=num_ranks, reason=self.problem)
            return
        self.requested_ranks, self.problem = num_ranks, ""
        if num_ranks == self._layout.ffn_ranks:
            return
        group, generation = self._group, self._generation + 1
        self._generation, self._next, self._begun_s = generation, layout, time.monotonic()
        self._adapter_changes = self._model.adapters.num_changes
        added, additions = range(self._layout.num_ranks, layout.num_ranks), group.additions
        assert additions is not None, "checked before"
        try:
            additions.start(added, num_ranks, generation)
        except OSError as exc:  # no memory, or no free descriptor
            additions.dismiss(added, kill=True)
            self.requested_ranks = self._layout.ffn_ranks
            self.problem = f"the processes of new ranks cannot be started: {exc.strerror or exc}"
            self.failed_scalings_total += 1
            log.warning("expert_ranks_not_changed", reason=self.problem, ranks=self._layout.ffn_ranks)
            return
        self._controls.send(PrepareExpertRanks(num_ranks, generation))
        self._joined = range(0)
        self._next_experts = loaded = []
        load = self._load_part if layout.ffn_ranks == 0 else None

        def prepare() -> None:
            group.heartbeat.watch_candidates(additions.admit(added, num_ranks, generation))
            if self._generation == generation:  # it may have been given up in the meantime
                self._joined = added
            if load is not None:
                loaded.append(load(expert_part(RankPosition(layout, 0))).weights)

        self._preparation = ScalingPreparation(group.store, layout, 0, generation, prepare)
        log.info("expert_ranks_preparing", ranks=num_ranks, ranks_before=self._layout.ffn_ranks)

    def update(self) -> bool:
        """Switch to the next layout if all ranks are prepared, and return whether they have switched.

        Call it between steps.
        """
        preparation = self._preparation
        if preparation is None:
            return False
        if (ended := self._ended_additions()) is not None:  # also when prepared: later its loss ends the group
            self._give_up(ended)
            return False
        if not preparation.is_done:
            return False
        try:
            groups = preparation.result()
            if self._model.adapters.num_changes != self._adapter_changes:
                raise ScalingFailed("adapters were loaded in the meantime: unload them, and send the request again")
        except ScalingFailed as exc:
            self._give_up(str(exc))
            return False
        switch_s = time.monotonic()
        self._before_switch()
        group, before, after = self._group, self._layout, self._next
        added, removed = range(before.num_ranks, after.num_ranks), range(after.num_ranks, before.num_ranks)
        group.heartbeat.dismiss(removed)
        self._controls.send(SwitchExpertRanks(commits=True))
        adopt_groups(group, groups)
        experts = self._next_experts.pop() if self._next_experts else None
        self._model.use_expert_ranks(group.ranks.rank_position, experts)
        group.heartbeat.admit(added)
        group.all_succeeded(True)  # returns once all ranks have switched, which a step would wait for
        pause_s = time.monotonic() - switch_s
        assert group.additions is not None, "checked before"
        group.additions.dismiss(removed)
        self._preparation = None
        self.scalings_total += 1
        self.switch_seconds_total += pause_s
        took_s, pause_ms = round(time.monotonic() - self._begun_s, 2), round(1e3 * pause_s, 1)
        ranks = {"ranks": after.ffn_ranks, "ranks_before": before.ffn_ranks}
        log.info("expert_ranks_changed", **ranks, duration_s=took_s, pause_ms=pause_ms)
        return True

    def cancel(self, reason: str) -> None:
        """Discard the change that is under way, if there is one."""
        if self._preparation is not None:
            self._give_up(reason)

    def metrics(self) -> dict[str, Any]:
        """Return the fields of CoreLoad about expert ranks."""
        return {
            "expert_ranks": self._layout.ffn_ranks,
            "can_change_expert_ranks": self._can_change,
            "requested_expert_ranks": self.requested_ranks,
            "expert_ranks_problem": self.problem,
            "expert_rank_changes_total": self.scalings_total,
            "failed_expert_rank_changes_total": self.failed_scalings_total,
            "expert_rank_switch_seconds_total": self.switch_seconds_total,
        }

    def _may_change(self) -> bool:
        """Return whether this engine can ever have one more or one less expert rank."""
        if self._controls.rank_group is None:
            return False
        for num_ranks in (self._layout.ffn_ranks + 1, self._layout.ffn_ranks - 1):
            try:
                self._require_feasible(self._with(num_ranks))
            except InvalidConfig:
                continue
            return True
        return False

    @property
    def _layout(self) -> Layout:
        return self._model.ranks.rank_position.layout

    @property
    def _group(self) -> RankGroup:
        group = self._controls.rank_group
        assert group is not None, "there are expert ranks"
        return group

    def _with(self, num_ranks: int) -> Layout:
        """Return the layout with this number of expert ranks. Raises InvalidConfig."""
        return with_expert_ranks(self._layout, num_ranks, steps_in_flight=self._controls.steps_in_flight)

    def _checked(self, num_ranks: int) -> Layout:
        """Return the next layout. Raises InvalidConfig with the reason if this engine cannot have it."""
        layout = self._with(num_ranks)
        if self._preparation is not None:
            raise InvalidConfig("the number of expert ranks is being changed: send the request again afterwards")
        if self._model.is_offloaded:
            raise InvalidConfig("the engine sleeps: wake it first")
        self._require_feasible(layout)
        if self._model.adapters.num_slots:
            raise InvalidConfig("adapters are loaded, whose parts would have to move: restart the engine instead")
        if self._group.excluded:
            raise InvalidConfig("a rank is excluded: restart the group first, which includes it again")
        return layout

    def _require_feasible(self, layout: Layout) -> None:
        """Raise InvalidConfig with the reason if this engine can never change to the layout, whatever its state."""
        experts, config = self._model.experts, self._config
        if experts is None or layout.ep > experts.num_placed:
            raise InvalidConfig(f"{layout.ep} ranks with experts are more than the model's experts: use fewer")
        self._model.require_part(RankPosition(layout))
        if self._model.device.type != "cpu":
            raise InvalidConfig("expert ranks on GPUs cannot be added or removed: restart the engine with --ffn-ranks")
        if config.offload.what is not Offload.NONE:
            raise InvalidConfig("expert ranks with --offload experts cannot be added or removed: restart the engine")
        if config.batch_invariant:
            raise InvalidConfig(
                "--batch-invariant needs a fixed number of expert ranks, since it decides the order of sums"
            )
        if self._group.additions is None:
            raise InvalidConfig("the ranks were started by a launcher: restart them with another number of --ffn-ranks")

    def _ended_additions(self) -> str | None:
        """Return why a new rank cannot join any more; None if all may."""
        additions, added = self._group.additions, range(self._layout.num_ranks, self._next.num_ranks)
        ended = {} if additions is None else additions.processes.ended()
        if ended.keys() & set(added):
            return next(ended[rank] for rank in added if rank in ended)
        silent = self._group.heartbeat.lost_candidates(self._joined)
        return f"rank {silent[0]} sends no heartbeat any more: its process hangs" if silent else None

    def _give_up(self, reason: str) -> None:
        group, added = self._group, range(self._layout.num_ranks, self._next.num_ranks)
        assert self._preparation is not None, "no change is under way"
        self._preparation.cancel(reason)
        self._preparation, self._next_experts = None, []
        self.requested_ranks, self.problem = self._layout.ffn_ranks, reason
        self.failed_scalings_total += 1
        self._controls.send(SwitchExpertRanks(commits=False))
        group.heartbeat.dismiss(added)
        if group.additions is not None:
            group.additions.dismiss(added, kill=True)
        advice = "the ranks of before go on; remove the cause, then send the request again"
        log.warning("expert_ranks_not_changed", reason=reason, ranks=self._layout.ffn_ranks, advice=advice)

"""Worker loop of a rank that holds only experts, whose number can change while the engine serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.distribution.rank_scaling import ranks_of
from moiety_engine.runner.adapter_loading import AdapterArranger
from moiety_engine.runner.expert_transfers import ExpertTransfers
from moiety_engine.runner.worker import WorkerBase

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.distribution.rank_group import RankGroup
    from moiety_engine.distribution.rank_scaling import NextGroups, ScalingPreparation
    from moiety_engine.model.loading import WeightShard
    from moiety_engine.model.remote_experts import ExpertServer
    from moiety_engine.runner.checkpoint_weights import CheckpointWeights
    from moiety_engine.runner.control_messages import RunDraftPass, RunStep


class ExpertWorker(WorkerBase):
    """Worker of a rank that holds only experts.

    It has no KV cache. Of a step it only needs the number of micro-batches, and a draft model has no experts here.
    """

    def __init__(
        self,
        experts: ExpertServer,
        rank_group: RankGroup,
        checkpoint: CheckpointWeights,
        *,
        overlaps: bool,
    ) -> None:
        """Create a worker. `checkpoint` also loads the experts of another position while steps run."""
        super().__init__(experts, rank_group, checkpoint, overlaps=overlaps)
        self._experts = experts
        self._next: tuple[RankPosition, list[WeightShard]] | None = None  # the next position, and its experts
        self._num_drafted = 0  # tokens of the newest pass of a draft model

    def _begin_scaling(self, begin: Callable[..., ScalingPreparation], position: RankPosition) -> ScalingPreparation:
        loaded: list[WeightShard] = []
        self._next = position, loaded
        return begin(lambda: loaded.append(self._checkpoint.load_part(position)))

    def _use_groups(self, groups: NextGroups) -> None:
        assert self._next is not None, "the experts of the next layout are not loaded"
        position, (share,) = self._next
        before, moves_experts = self._experts, self._expert_transfers is not None
        if self._expert_transfers is not None:
            self._expert_transfers.close()
        ranks = ranks_of(groups, position.rank, moves_experts=moves_experts)
        self._experts = share.experts(ranks)
        self._share = self._experts
        before.close()
        self._rank_group.heartbeat.report_waited(ranks.waited)
        self._rank_group.ranks = ranks
        self._rank_group.channel.replace_group(groups.everyone)
        self._arranger.close()
        self._arranger = AdapterArranger(self._share)
        self._expert_transfers = None if ranks.transfers is None else ExpertTransfers(self._experts, ranks.transfers)

    def _discard_scaling(self) -> None:
        self._next = None

    def _draft(self, message: RunDraftPass) -> None:
        if message.number:  # rank 0 sends all other ranks the tokens of the pass before
            token_L = torch.empty(self._num_drafted, dtype=torch.int64, device=self._experts.device)
            self._rank_group.ranks.everyone.broadcast_first(token_L)
        self._num_drafted = message.num_wanted

    def _step(self, step: RunStep) -> None:
        self._experts.answer(step.num_micro_batches, has_adapters=step.has_adapters)
        self._receive_tokens(step)

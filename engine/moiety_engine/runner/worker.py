"""Worker loop of every rank other than rank 0. It executes rank 0's control messages and makes no decisions.

L rows whose results are wanted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog
import torch

from moiety_engine.distribution.layout import RankPosition, expert_part, with_expert_ranks
from moiety_engine.distribution.rank_scaling import NextGroups, ScalingPreparation, adopt_groups
from moiety_engine.errors import AdapterError, OutOfMemory, SleepFileError
from moiety_engine.images.feature_cache import FeatureCache, features_of
from moiety_engine.kv_transfer.rank_messages import (
    DropTransfer,
    EndSend,
    LoadTransfer,
    OpenReceiver,
    PollTransfer,
    TransferMessage,
)
from moiety_engine.kv_transfer.rank_transfers import sum_transfer_progress
from moiety_engine.runner.adapter_loading import AdapterArranger, prepare_slots, sent_modules
from moiety_engine.runner.adapter_messages import AdapterMessage, DropAdapter, LayOutAdapters, LoadAdapter, SendAdapter
from moiety_engine.runner.control_messages import (
    Allocate,
    ControlMessage,
    CopyDiskRows,
    EncodeImage,
    EndStep,
    ForgetImages,
    MoveStates,
    OffloadWeights,
    OpenDiskRows,
    Release,
    ReloadWeights,
    RunDraftPass,
    RunStep,
    Stop,
    Swap,
)
from moiety_engine.runner.device_state import free_cached_memory
from moiety_engine.runner.draft_passes import DraftPasses
from moiety_engine.runner.expert_messages import (
    BeginExpertMove,
    EndExpertMove,
    ExpertMessage,
    PrepareExpertRanks,
    SwitchExpertRanks,
)
from moiety_engine.runner.expert_transfers import ExpertTransfers
from moiety_engine.runner.inputs import BatchBuilder
from moiety_engine.runner.kv_swap import HostKv
from moiety_engine.runner.micro_batches import cut
from moiety_engine.runner.scoring import in_turns
from moiety_engine.runner.state_rows import StateCopier
from moiety_engine.runner.token_division import rank_slots_of
from moiety_engine.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moiety_engine.distribution.rank_group import RankGroup
    from moiety_engine.kv_transfer.rank_transfers import RankTransfers
    from moiety_engine.model.adapter_stacks import PreparedSlots
    from moiety_engine.model.batch import KvCache
    from moiety_engine.model.pending_pass import PendingPass
    from moiety_engine.model.remote_experts import ExpertServer
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.model.weights import ModelWeights
    from moiety_engine.runner.checkpoint_weights import CheckpointWeights

log = structlog.get_logger()


class RankDisk(Protocol):
    """A rank's part of the disk tier."""

    def open_rows(self, message: OpenDiskRows, kv: KvCache) -> None: ...
    def copy(self, message: CopyDiskRows) -> None: ...
    def release(self) -> None: ...
    def close(self) -> None: ...


class WorkerBase:
    """Base of all workers: executes one control message after the other. Owns the decoder of the messages."""

    def __init__(
        self, share: Transformer | ExpertServer, rank_group: RankGroup, checkpoint: CheckpointWeights, *, overlaps: bool
    ) -> None:
        """Create a worker for this rank's share of the model. `overlaps` must equal the value of rank 0's step loop.

        `checkpoint` loads weights of this rank once more.
        """
        self._share, self._rank_group, self._overlaps = share, rank_group, overlaps
        self._checkpoint = checkpoint
        self._arranger = AdapterArranger(share)
        group = rank_group.ranks.transfers
        self._expert_transfers = None if group is None else ExpertTransfers(share, group)
        self._scaling: ScalingPreparation | None = None
        self._is_removed = False
        self._decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)

    def run(self) -> None:
        """Execute control messages until rank 0 sends Stop, or removes this rank."""
        while not self._is_removed:
            message = self._decoder.decode(self._rank_group.channel.receive())
            if isinstance(message, Stop):
                return
            self._execute(message)

    def close(self) -> None:
        """Close the files and threads of this rank; nothing may be computed afterwards."""
        self._arranger.close()
        if self._expert_transfers is not None:
            self._expert_transfers.close()
        for share in self._shares():
            share.close()

    def _execute(self, message: ControlMessage) -> None:
        match message:
            case RunStep():
                self._step(message)
            case EndStep():
                self._end_step()
            case RunDraftPass():
                self._draft(message)
            case Swap():
                self._swap(message)
            case MoveStates():
                self._move_states(message)
            case BeginExpertMove() | EndExpertMove() | PrepareExpertRanks() | SwitchExpertRanks():
                self._change_experts(message)
            case EncodeImage() | ForgetImages():
                self._change_images(message)
            case Release():
                self._release()
            case LayOutAdapters() | SendAdapter() | LoadAdapter() | DropAdapter():
                self._change_adapters(message)
            case CopyDiskRows():
                self._copy_disk_rows(message)
            case EndSend() | OpenReceiver() | PollTransfer() | LoadTransfer() | DropTransfer():
                self._transfer(message)
            case _:
                self._execute_on_all_ranks(message)

    def _execute_on_all_ranks(self, message: ControlMessage) -> None:
        """Execute a message that may run out of memory."""
        match message:
            case Allocate():
                self._release()
                self._run_on_all_ranks(lambda: self._allocate(message))
            case OffloadWeights():
                self._run_on_all_ranks(lambda: self._offload_weights(message.folder))
            case ReloadWeights():
                self._run_on_all_ranks(self._reload_weights)
            case OpenDiskRows():
                self._run_on_all_ranks(lambda: self._open_disk_rows(message))

    def _step(self, step: RunStep) -> None:
        raise NotImplementedError

    def _end_step(self) -> None: ...
    def _draft(self, message: RunDraftPass) -> None: ...
    def _swap(self, swap: Swap) -> None: ...
    def _move_states(self, message: MoveStates) -> None: ...
    def _change_experts(self, message: ExpertMessage) -> None:
        match message:
            case BeginExpertMove():
                assert self._expert_transfers is not None, "experts move without a group for transfers"
                self._expert_transfers.begin(message.layer, message.writes)
            case EndExpertMove():
                assert self._expert_transfers is not None, "experts move without a group for transfers"
                self._expert_transfers.end(commits=message.commits)
            case PrepareExpertRanks():
                self._prepare_expert_ranks(message)
            case SwitchExpertRanks():
                self._switch_expert_ranks(message)

    def _prepare_expert_ranks(self, message: PrepareExpertRanks) -> None:
        """Prepare another number of expert ranks in the background, unless this rank is to be removed."""
        position = self._rank_group.ranks.rank_position
        layout = with_expert_ranks(position.layout, message.num_ranks)
        if position.rank < layout.num_ranks:
            begin = partial(ScalingPreparation, self._rank_group.store, layout, position.rank, message.generation)
            self._scaling = self._begin_scaling(begin, RankPosition(layout, position.rank))

    def _begin_scaling(self, begin: Callable[..., ScalingPreparation], _: RankPosition) -> ScalingPreparation:
        return begin()

    def _switch_expert_ranks(self, message: SwitchExpertRanks) -> None:
        scaling, self._scaling = self._scaling, None
        if message.commits:
            self._is_removed = scaling is None
            if scaling is not None:
                self._use_groups(scaling.result())  # rank 0 may have seen the end a moment earlier
                self._rank_group.all_succeeded(True)  # no step runs before all ranks have switched
        self._discard_scaling()

    def _use_groups(self, groups: NextGroups) -> None:
        raise NotImplementedError

    def _discard_scaling(self) -> None: ...

    def _change_images(self, message: EncodeImage | ForgetImages) -> None: ...
    def _allocate(self, message: Allocate) -> None: ...
    def _release(self) -> None: ...
    def _open_disk_rows(self, message: OpenDiskRows) -> None: ...
    def _transfer(self, message: TransferMessage) -> None:
        if isinstance(message, PollTransfer):
            sum_transfer_progress(self._rank_group.ranks.everyone, None)

    def _copy_disk_rows(self, message: CopyDiskRows) -> None: ...

    def _change_adapters(self, message: AdapterMessage) -> None:
        """Execute a message about adapters. Slots are replaced only if all ranks have memory for the new ones."""
        match message:
            case LayOutAdapters():
                prepared: list[PreparedSlots] = []
                if self._run_on_all_ranks(lambda: prepared.append(prepare_slots(self._share, message))):
                    self._share.adapters.commit(prepared[0])
            case SendAdapter():
                self._arranger.begin(message.number, sent_modules(message, self._share.adapters.dtype))
            case LoadAdapter():
                self._run_on_all_ranks(lambda: self._arranger.fill(message.number, message.slot))
            case DropAdapter():
                self._arranger.drop(message.number)

    def _run_on_all_ranks(self, do: Callable[[], None]) -> bool:
        """Run an operation that may fail on any rank, and return whether it succeeded on all ranks."""
        succeeded = False
        try:
            do()
            succeeded = True
        except (OutOfMemory, RuntimeError, MemoryError) as exc:  # torch raises RuntimeError
            log.warning(
                "rank_out_of_memory",
                rank=self._rank_group.heartbeat.rank,
                reason=str(exc),
                advice="give this rank more free memory, or set --kv-memory-bytes or --adapter-memory-bytes lower",
            )
        except SleepFileError as exc:
            advice = "the engine stays asleep: repair the disk and wake it again, or restart it"
            rank = self._rank_group.heartbeat.rank
            log.warning("rank_weights_unreadable", rank=rank, reason=str(exc), advice=advice)
        except AdapterError as exc:
            log.warning(
                "rank_adapter_failed",
                rank=self._rank_group.heartbeat.rank,
                reason=str(exc),
                advice="requests for this adapter are refused; check that it was trained on this model",
            )
        return self._rank_group.all_succeeded(succeeded)

    def _offload_weights(self, folder: str) -> None:
        for share in self._shares():
            if not share.is_offloaded:
                share.offload_weights(lambda: None, folder)
        free_cached_memory(self._share.device)

    def _reload_weights(self) -> None:
        shares = self._shares()
        for number, share in enumerate(shares):
            if share.is_offloaded:
                share.reload_weights(lambda: None, partial(self._checkpoint.load, shares, number))

    def _shares(self) -> list[Transformer | ExpertServer]:
        """Return this rank's shares of all models."""
        return [self._share]

    def _receive_tokens(self, step: RunStep) -> Tensor | None:
        """Return the tokens that the step samples, received from rank 0; None if rank 0 does not send them."""
        if not self._overlaps or not step.num_sampled:
            return None
        token_L = torch.empty(step.num_sampled, dtype=torch.int64, device=self._share.device)
        return self._rank_group.ranks.everyone.broadcast_first(token_L)


class Worker(WorkerBase):
    """Worker of a rank with layers. Owns the rank's device state."""

    def __init__(
        self,
        model: Transformer,
        rank_group: RankGroup,
        draft_models: tuple[Transformer, ...] = (),
        *,
        overlaps: bool,
        disk: RankDisk | None = None,
        transfers: RankTransfers | None = None,
        steps_in_flight: int = 1,
        checkpoint: CheckpointWeights,
    ) -> None:
        """Create a worker of a group that has `steps_in_flight` steps in its stages at once.

        `draft_models` are this rank's shares of the draft model or MTP layers, `disk` its part of the disk tier, and
        `transfers` its KV transfer to or from other engines, if there are any.
        """
        super().__init__(model, rank_group, checkpoint, overlaps=overlaps)
        self._next_experts: list[ModelWeights] = []  # of this rank, which expert ranks have until the next switch
        self._disk, self._transfers = disk, transfers
        self._model = model
        self._passes = DraftPasses(draft_models, Staging(model.device)) if draft_models else None
        self._num_drafted = 0  # tokens of the newest pass
        position = rank_group.ranks.rank_position
        self._group, self._part = position.cache_group, position.dp_rank  # its part of a step
        self._has_copies = position.layout.pcp > 1
        self._kv: KvCache | None = None
        self._host_kv: HostKv | None = None
        self._state_copier: StateCopier | None = None
        self._sampled_L: Tensor | None = None
        self._begun: deque[tuple[RunStep, PendingPass]] = deque()  # steps that later stages may still compute
        self._features: FeatureCache | None = None
        self._staging = Staging(model.device, steps_in_flight)

    def _allocate(self, message: Allocate) -> None:
        slots = message.num_state_slots, message.num_record_tokens
        kv = self._model.allocate_kv(message.num_blocks, message.block_size, *slots)
        self._kv = replace(kv, windows=message.windows)
        self._host_kv = HostKv(self._kv, message.num_host_blocks) if message.num_host_blocks else None
        self._state_copier = StateCopier(self._kv, message.num_host_state_slots, self._model.recurrent)
        self._features = features_of(self._model, message.image_cache_bytes)
        self._builder = BatchBuilder(message.block_size, self._model.device, self._staging, features=self._features)
        if self._passes is not None:
            self._passes.allocate(self._kv, message.num_blocks, message.block_size)
        if self._transfers is not None:
            self._transfers.serve(self._kv)

    def close(self) -> None:
        super().close()
        if self._disk is not None:
            self._disk.close()
        if self._transfers is not None:
            self._transfers.close()

    def _shares(self) -> list[Transformer | ExpertServer]:
        return [self._model] if self._passes is None else [self._model, *self._passes.models]

    def _swap(self, swap: Swap) -> None:
        assert self._host_kv is not None, "blocks are swapped without a host tier"
        self._host_kv.run_own(self._group, swap.outs, swap.ins)

    def _move_states(self, message: MoveStates) -> None:
        assert self._state_copier is not None, "states are moved without a cache"
        self._state_copier.replay(self._group, message.replays)
        self._state_copier.run(self._group, message.copies)

    def _begin_scaling(self, begin: Callable[..., ScalingPreparation], position: RankPosition) -> ScalingPreparation:
        if position.layout.ffn_ranks:
            return begin()
        self._next_experts = loaded = []
        return begin(lambda: loaded.append(self._checkpoint.load_part(expert_part(position)).weights))

    def _use_groups(self, groups: NextGroups) -> None:
        adopt_groups(self._rank_group, groups)
        experts = self._next_experts.pop() if self._next_experts else None
        self._model.use_expert_ranks(self._rank_group.ranks.rank_position, experts)

    def _discard_scaling(self) -> None:
        self._next_experts = []

    def _change_images(self, message: EncodeImage | ForgetImages) -> None:
        if isinstance(message, EncodeImage):
            assert self._features is not None, "an image is encoded without an encoder"
            self._features.encode(message.key, message.image)
        elif self._features is not None:
            self._features.forget(frozenset(message.marks))

    def _open_disk_rows(self, message: OpenDiskRows) -> None:
        assert self._disk is not None, "rows are opened without a disk tier"
        assert self._kv is not None, "rows are opened without a KV cache"
        self._disk.open_rows(message, self._kv)

    @torch.inference_mode()
    def _transfer(self, message: TransferMessage) -> None:
        assert self._transfers is not None, "KV is transferred without a connection"
        self._transfers.execute(message)

    def _copy_disk_rows(self, message: CopyDiskRows) -> None:
        if message.group == self._group:
            assert self._disk is not None, "rows are copied without a disk tier"
            self._disk.copy(message)

    @torch.inference_mode()
    def _step(self, step: RunStep) -> None:
        assert self._kv is not None, "a step runs without a KV cache"
        self._staging.begin_step()
        host, spread = step.parts[self._part].batch(), step.spread(self._staging)
        rank_slots = rank_slots_of([part.batch() for part in step.parts]) if self._has_copies else ()
        batch = self._builder.upload(host, self._sampled_L, spread, cut(host, step.num_micro_batches), rank_slots)
        if self._features is not None:
            self._features.end_step(step.image_parts)
        leaving = None if self._transfers is None else self._transfers.sends(step.sends, self._kv)
        self._begun.append((step, self._model.begin_pass(batch, self._kv, leaving)))
        if not step.ends_later:
            self._end_step()

    @torch.inference_mode()
    def _end_step(self) -> None:
        step, begun = self._begun.popleft()
        hidden_LD = self._model.end_pass(begun)
        self._model.logits(hidden_LD[: step.num_sampled])
        self._sampled_L = self._receive_tokens(step)
        for rows_LD in in_turns(hidden_LD[len(hidden_LD) - step.num_scored :]):
            self._model.logits(rows_LD)

    @torch.inference_mode()
    def _draft(self, message: RunDraftPass) -> None:
        passes = self._passes
        assert passes is not None, "a draft is requested from a rank without a draft model"
        if not message.number:
            passes.begin(self._sampled_L)
        elif self._num_drafted:
            token_L = torch.empty(self._num_drafted, dtype=torch.int64, device=self._model.device)
            passes.add_drafted(self._rank_group.ranks.everyone.broadcast_first(token_L))
        self._num_drafted = message.num_wanted
        hidden_LD = passes.run(message.parts[self._part].batch(), message.number, message.spread(passes.staging))
        if message.num_wanted:
            passes.model_of(message.number).logits(hidden_LD)

    def _release(self) -> None:
        self._model.ranks.pipeline.finish_sends()
        if self._passes is not None:
            self._passes.release()
        if self._disk is not None:
            self._disk.release()
        if self._transfers is not None:
            self._transfers.serve(None)
        self._kv = self._host_kv = self._state_copier = self._sampled_L = self._features = None
        free_cached_memory(self._model.device)

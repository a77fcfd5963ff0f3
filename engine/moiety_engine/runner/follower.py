"""The life of another rank than the first: it does what rank 0 tells it, and decides nothing.

L rows whose results are wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import structlog
import torch

from moiety_engine.errors import OutOfMemory
from moiety_engine.runner.inputs import BatchBuilder
from moiety_engine.runner.orders import Allocate, ComeBack, Leave, MoveExperts, Order, Release, Step, Stop, Swap
from moiety_engine.runner.resident import free_cached_memory
from moiety_engine.runner.scoring import in_turns
from moiety_engine.runner.swap import HostKv
from moiety_engine.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moiety_engine.distribution.crew import Crew
    from moiety_engine.model.batch import KvCache
    from moiety_engine.model.transformer import Transformer

log = structlog.get_logger()


class Follower:
    """Owns what the rank has on its device. `overlaps` as rank 0's loop has it."""

    def __init__(self, model: Transformer, crew: Crew, *, overlaps: bool) -> None:
        self._model, self._crew, self._overlaps = model, crew, overlaps
        self._group = crew.ranks.seat.dp_rank
        self._decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
        self._kv: KvCache | None = None
        self._host_kv: HostKv | None = None
        self._sampled_L: Tensor | None = None
        self._staging = Staging(model.device)

    def run(self) -> None:
        """Until rank 0 says stop."""
        while True:
            order = self._decoder.decode(self._crew.channel.receive())
            if isinstance(order, Stop):
                return
            self._obey(order)

    def _obey(self, order: Order) -> None:
        match order:
            case Step():
                self._step(order)
            case Swap():
                assert self._host_kv is not None, "blocks are swapped, and there is no host tier"
                self._host_kv.run_own(self._group, order.outs, order.ins)
            case MoveExperts():
                self._model.move_experts(order.layer, order.writes)
            case Allocate():
                self._release()
                self._together(lambda: self._allocate(order))
            case Release():
                self._release()
            case Leave():
                self._together(self._leave)
            case ComeBack():
                self._together(self._come_back)

    def _together(self, do: Callable[[], None]) -> None:
        """What may find no room; all ranks hear whether one did not."""
        did = False
        try:
            do()
            did = True
        except (OutOfMemory, RuntimeError) as exc:  # torch raises the second
            log.warning("rank_has_no_room", rank=self._crew.lifeline.rank, reason=str(exc))
        self._crew.all_did(did)

    def _allocate(self, order: Allocate) -> None:
        self._kv = self._model.allocate_kv(order.num_blocks, order.block_size)
        self._host_kv = HostKv(self._kv, order.num_host_blocks) if order.num_host_blocks else None
        self._builder = BatchBuilder(order.block_size, self._model.device, self._staging)

    def _leave(self) -> None:
        if not self._model.away:
            self._model.leave(lambda: None)
            free_cached_memory(self._model.device)

    def _come_back(self) -> None:
        if self._model.away:
            self._model.come_back(lambda: None)

    @torch.inference_mode()
    def _step(self, step: Step) -> None:
        assert self._kv is not None, "a step is to run, and there is no cache"
        self._staging.turn()
        host, spread = step.parts[self._group].batch(), step.spread(self._staging)
        hidden_LD = self._model.hidden(self._builder.upload(host, self._sampled_L, spread), self._kv)
        self._model.logits(hidden_LD[: step.num_sampled])
        if self._overlaps and step.num_sampled:
            token_L = torch.empty(step.num_sampled, dtype=torch.int64, device=self._model.device)
            self._sampled_L = self._crew.ranks.everyone.copy_first(token_L)
        for rows_LD in in_turns(hidden_LD[len(hidden_LD) - step.num_scored :]):
            self._model.logits(rows_LD)

    def _release(self) -> None:
        self._kv = self._host_kv = self._sampled_L = None
        free_cached_memory(self._model.device)

"""A model's experts in a store that is larger than the device, and slots on the device for some of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.errors import InvalidConfig
from moiety_engine.offload.file import ExpertFile
from moiety_engine.offload.layer import LayerExperts, Traffic
from moiety_engine.offload.loaders import ExpertLoader, FileExpertLoader, StreamExpertLoader
from moiety_engine.offload.pinned import PinnedExperts
from moiety_engine.offload.slot_table import ExpertSlotTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.config import OffloadConfig

Store = ExpertFile | PinnedExperts
Shapes = list[dict[str, tuple[tuple[int, ...], torch.dtype]]]  # of each layer's tensors, with an expert in each row


class ExpertCache:
    """Owns the store, the slots and what brings experts from the one into the others. `slots`: of each layer the
    tensors, by name, with a slot in each row."""

    def __init__(self, store: Store, budget_bytes: int, top_k: int, device: torch.device, config: OffloadConfig):
        """The store is finished. Raises InvalidConfig where a token's experts would not fit."""
        shapes = shapes_in(store)
        expert_bytes = [sum(_row_bytes(*one) for one in layer.values()) for layer in shapes]
        self.num_experts = [next(iter(layer.values()))[0][0] for layer in shapes]
        num_slots = slots_a_layer(budget_bytes, expert_bytes, min(self.num_experts), top_k)
        self.prefetches = config.prefetch
        self.traffic = Traffic()
        self.slots: list[dict[str, Tensor]] = [
            {
                name: torch.empty((num_slots, *shape[1:]), dtype=dtype, device=device)
                for name, (shape, dtype) in layer.items()
            }
            for layer in shapes
        ]
        self._store, self._mover = store, _mover(store, [list(layer.values()) for layer in self.slots])
        self.layers = [
            LayerExperts(number, ExpertSlotTable(num, num_slots, config.eviction), self._mover, num_bytes, self.traffic)
            for number, (num, num_bytes) in enumerate(zip(self.num_experts, expert_bytes, strict=True))
        ]
        for layer in self.layers:
            layer.fill()

    @property
    def num_slots(self) -> int:
        """Of all layers."""
        return sum(layer.num_slots for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Of the device's memory."""
        return sum(part.nbytes for layer in self.slots for part in layer.values())

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        for layer in self.layers:
            layer.settle()

    def close(self) -> None:
        """Nothing is computed with the slots any more."""
        self._mover.close()
        self._store.close()


def slots_a_layer(budget_bytes: int, expert_bytes: Sequence[int], num_experts: int, top_k: int) -> int:
    """Slots that each layer gets of the budget, all alike. `expert_bytes`: of one expert of each layer. Raises
    InvalidConfig where a token's experts would not fit."""
    num_slots = min(budget_bytes // sum(expert_bytes), num_experts)
    if num_slots < top_k:
        raise InvalidConfig(
            f"{budget_bytes} bytes hold {num_slots} experts of each of {len(expert_bytes)} layers, and a token needs "
            f"{top_k}: give --expert-memory-bytes at least {top_k * sum(expert_bytes)}"
        )
    return num_slots


def shapes_in(store: Store) -> Shapes:
    """Of all experts in a finished store."""
    if isinstance(store, ExpertFile):
        return [{part.name: (part.shape, part.torch_dtype) for part in layer} for layer in store.layers]
    return [{name: (tuple(one.shape), one.dtype) for name, one in layer.items()} for layer in store.tensors]


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape[1:]).numel() * dtype.itemsize


def _mover(store: Store, slots: list[list[Tensor]]) -> ExpertLoader:
    if isinstance(store, ExpertFile):
        return FileExpertLoader(store, slots)
    return StreamExpertLoader([list(layer.values()) for layer in store.tensors], slots)

"""Expert cache: a store with all experts of a model, and device slots for some experts of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.errors import InvalidConfig
from moiety_engine.offload.file import ExpertFile
from moiety_engine.offload.layer import ExpertCacheCounters, LayerExperts
from moiety_engine.offload.loaders import ExpertLoader, FileExpertLoader, StreamExpertLoader
from moiety_engine.offload.pinned import PinnedExperts
from moiety_engine.offload.slot_table import ExpertSlotTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.config import OffloadConfig

Store = ExpertFile | PinnedExperts
Shapes = list[dict[str, tuple[tuple[int, ...], torch.dtype]]]  # by layer and tensor name, with one expert per row


class ExpertCache:
    """Owner of the expert store, the device slots and the loader that copies experts into slots.

    `slots`: the tensors of each layer by name, with one slot per row.
    """

    def __init__(self, store: Store, budget_bytes: int, top_k: int, device: torch.device, config: OffloadConfig):
        """Allocate the slots and fill them from the finished `store`.

        Raises InvalidConfig if `budget_bytes` cannot hold the experts of one token in every layer.
        """
        shapes = shapes_in(store)
        expert_bytes = [sum(_row_bytes(*one) for one in layer.values()) for layer in shapes]
        self.num_experts = [next(iter(layer.values()))[0][0] for layer in shapes]
        num_slots = slots_a_layer(budget_bytes, expert_bytes, min(self.num_experts), top_k)
        self.prefetches = config.prefetch
        self.traffic = ExpertCacheCounters()
        self.slots: list[dict[str, Tensor]] = [
            {
                name: torch.empty((num_slots, *shape[1:]), dtype=dtype, device=device)
                for name, (shape, dtype) in layer.items()
            }
            for layer in shapes
        ]
        self._store, self._loader = store, _loader(store, [list(layer.values()) for layer in self.slots])
        self.layers = [
            LayerExperts(
                number, ExpertSlotTable(num, num_slots, config.eviction), self._loader, num_bytes, self.traffic
            )
            for number, (num, num_bytes) in enumerate(zip(self.num_experts, expert_bytes, strict=True))
        ]
        for layer in self.layers:
            layer.fill()

    @property
    def num_slots(self) -> int:
        """Slots of all layers together."""
        return sum(layer.num_slots for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Device memory of all slots, in bytes."""
        return sum(part.nbytes for layer in self.slots for part in layer.values())

    def figures(self) -> dict[str, int]:
        """Return the cache's fields of CoreLoad. Callable from any thread."""
        traffic = self.traffic
        return {
            "expert_slots": self.num_slots,
            "expert_hits_total": traffic.hits_total,
            "expert_misses_total": traffic.misses_total,
            "prefetched_experts_total": traffic.prefetched_total,
            "prefetched_expert_hits_total": traffic.prefetch_hits_total,
            "expert_loaded_bytes_total": traffic.loaded_bytes_total,
        }

    def settle(self) -> None:
        """Wait until no load is in flight."""
        for layer in self.layers:
            layer.settle()

    def close(self) -> None:
        """Close the loader and the store; no computation may use the slots afterwards."""
        self._loader.close()
        self._store.close()


def slots_a_layer(budget_bytes: int, expert_bytes: Sequence[int], num_experts: int, top_k: int) -> int:
    """Return the number of slots that each layer gets from the budget, the same for all layers.

    `expert_bytes`: bytes of one expert of each layer. Raises InvalidConfig if the slots are fewer than a token's
    `top_k` experts.
    """
    num_slots = min(budget_bytes // sum(expert_bytes), num_experts)
    if num_slots < top_k:
        raise InvalidConfig(
            f"{budget_bytes} bytes hold {num_slots} experts for each of {len(expert_bytes)} layers, but a "
            f"token needs {top_k}: set --expert-memory-bytes to at least {top_k * sum(expert_bytes)}"
        )
    return num_slots


def shapes_in(store: Store) -> Shapes:
    """Return the shapes and dtypes of all expert tensors in a finished store, by layer and name."""
    if isinstance(store, ExpertFile):
        return [{part.name: (part.shape, part.torch_dtype) for part in layer} for layer in store.layers]
    return [{name: (tuple(one.shape), one.dtype) for name, one in layer.items()} for layer in store.tensors]


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape[1:]).numel() * dtype.itemsize


def _loader(store: Store, slots: list[list[Tensor]]) -> ExpertLoader:
    if isinstance(store, ExpertFile):
        return FileExpertLoader(store, slots)
    return StreamExpertLoader([list(layer.values()) for layer in store.tensors], slots)

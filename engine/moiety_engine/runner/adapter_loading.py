"""Loading of adapters into slots on all ranks: rank 0 reads an adapter and sends it, and each rank keeps its part.

All ranks change their slots between the same two steps. A reallocation for which one rank has too little memory changes
nothing on any of them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from moiety_engine.errors import OutOfMemory
from moiety_engine.model.adapter_modules import AdapterModules, rank_factors
from moiety_engine.model.adapter_stacks import Product
from moiety_engine.runner.control_messages import LayOutAdapters, LoadAdapter, SentModule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from moiety_engine.model.adapter_stacks import AdapterWeights, Key, PreparedSlots
    from moiety_engine.model.remote_experts import ExpertServer
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.runner.control_messages import ControlSender


class AdapterLoader:
    """Rank 0's loader of adapters, on all ranks. Used by the step loop's thread only, between steps."""

    def __init__(self, model: Transformer, controls: ControlSender) -> None:
        self._model, self._controls = model, controls
        self._is_alone = model.ranks.everyone.size == 1

    def lay_out(self, keys: frozenset[Key], num_slots: int, rank: int, moves: Mapping[int, int]) -> None:
        """Reallocate the slots on all ranks; see `AdapterStacks.lay_out`.

        Raises OutOfMemory if a rank has too little memory; with several ranks, all slots are then as they were.
        """
        if self._is_alone:
            self._model.lay_out_adapters(keys, num_slots, rank, moves)
            return
        message = LayOutAdapters(sorted(keys), num_slots, rank, dict(moves))
        with self._controls.run_on_all_ranks(message), _as_out_of_memory():
            prepared = prepare_slots(self._model, message)
        self._model.adapters.commit(prepared)

    def fill(self, slot: int, modules: AdapterModules, weights: AdapterWeights) -> None:
        """Write an adapter into a slot on all ranks. `weights`: the same adapter as the factors of a single rank.

        Raises OutOfMemory if a rank has too little memory; the content of the slot is then undefined.
        """
        if self._is_alone:
            self._model.adapters.fill(slot, weights)
            return
        message = load_message(slot, modules, self._model.adapters.dtype)
        with self._controls.run_on_all_ranks(message), _as_out_of_memory():
            load_adapter(self._model, message)


def prepare_slots(share: Transformer | ExpertServer, message: LayOutAdapters) -> PreparedSlots:
    """Allocate the slots of a layout on this rank."""
    keys = frozenset((layer, Product(product)) for layer, product in message.keys)
    return share.adapters.prepare(keys, message.num_slots, message.rank, message.moves)


def load_message(slot: int, modules: AdapterModules, dtype: torch.dtype) -> LoadAdapter:
    """Return the message that loads the adapter; its factors are sent in `dtype`, in which all ranks serve them."""
    sent = [
        SentModule(layer, name, down.shape[1], _bytes_of(down, dtype), _bytes_of(up, dtype))
        for (layer, name), (down, up) in modules.factors.items()
    ]
    return LoadAdapter(slot, modules.rank, sent)


def load_adapter(share: Transformer | ExpertServer, message: LoadAdapter) -> None:
    """Write this rank's part of an adapter into its slot."""
    dtype, rank = share.adapters.dtype, message.rank
    factors = {
        (one.layer, one.name): (
            _tensor(one.down, dtype).view(rank, one.num_inputs),
            _tensor(one.up, dtype).view(-1, rank),
        )
        for one in message.modules
    }

    def held_by(layer: int) -> Sequence[int] | None:
        slots = share.slots_of(layer)
        return None if slots is None else slots.held

    modules = AdapterModules(rank, factors)
    share.adapters.fill(message.slot, rank_factors(modules, share.spec, share.ranks.rank_position, held_by))


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> bytes:
    return tensor.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()


def _tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)


@contextmanager
def _as_out_of_memory() -> Iterator[None]:
    """Raise OutOfMemory where an allocation within fails."""
    try:
        yield
    except (RuntimeError, MemoryError) as exc:  # torch raises RuntimeError on a CPU
        raise OutOfMemory(f"the first rank has too little memory: {exc}") from exc

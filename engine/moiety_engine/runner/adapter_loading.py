"""Loading of adapters into slots on all ranks: rank 0 reads an adapter and sends it, and each rank keeps its part.

Each rank arranges its part in a thread while steps run. All ranks change their slots between the same two steps. A
reallocation for which one rank has too little memory changes nothing on any of them.
"""

from __future__ import annotations

import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moiety_engine.errors import AdapterError, OutOfMemory
from moiety_engine.model.adapter_modules import AdapterModules, rank_factors
from moiety_engine.model.adapter_stacks import Product
from moiety_engine.runner.adapter_messages import DropAdapter, LayOutAdapters, LoadAdapter, SendAdapter, SentModule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from moiety_engine.model.adapter_stacks import AdapterWeights, Key, PreparedSlots
    from moiety_engine.model.remote_experts import ExpertServer
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.runner.control_messages import ControlSender

_Held = dict[int, tuple[int, ...]]  # experts in the rank's slots by layer


@dataclass(frozen=True, slots=True)
class _Arranging:
    """An adapter and its arrangement for the experts that the rank held at its beginning."""

    modules: AdapterModules
    held: _Held
    weights: Future[AdapterWeights]


class AdapterArranger:
    """Arranger of one rank's parts of adapters, in a thread. The adapters are numbered by rank 0.

    Used by the thread that runs steps only.
    """

    def __init__(self, share: Transformer | ExpertServer) -> None:
        self._share = share
        self._arranging: dict[int, _Arranging] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapter-parts")

    def begin(self, number: int, modules: AdapterModules) -> None:
        """Begin to arrange this rank's part of an adapter."""
        held = self._held_now()
        weights = self._thread.submit(self._arrange, modules, held)
        self._arranging[number] = _Arranging(modules, held, weights)

    def is_done(self, number: int) -> bool:
        """Return whether the adapter is arranged, or cannot be."""
        return self._arranging[number].weights.done()

    def check(self, number: int) -> None:
        """Wait until the adapter is arranged. Raises AdapterError if it does not fit the model."""
        self._arranging[number].weights.result()

    def fill(self, number: int, slot: int) -> None:
        """Wait until an adapter is arranged, write it into a slot, and drop it.

        If experts have moved to other ranks since its beginning, it is arranged again.
        """
        one = self._arranging.pop(number)
        weights, held = one.weights.result(), self._held_now()
        self._share.adapters.fill(slot, weights if held == one.held else self._arrange(one.modules, held))

    def drop(self, number: int) -> None:
        """Drop an adapter that was begun; does nothing if it is not there any more."""
        one = self._arranging.pop(number, None)
        if one is not None:
            one.weights.cancel()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _arrange(self, modules: AdapterModules, held: _Held) -> AdapterWeights:
        """Return this rank's factors of an adapter.

        Raises OutOfMemory, and AdapterError for every other problem, so that a tenant's files cannot stop the engine.
        """
        try:
            return rank_factors(modules, self._share.spec, self._share.ranks.rank_position, held.get)
        except (AdapterError, OutOfMemory):
            raise
        except MemoryError as exc:
            raise OutOfMemory("this rank has too little memory for an adapter") from exc
        except Exception as exc:
            raise AdapterError(f"the adapter cannot be arranged: {exc!r}") from exc

    def _held_now(self) -> _Held:
        slots = {layer: self._share.slots_of(layer) for layer in range(len(self._share.spec.layers))}
        return {layer: one.held for layer, one in slots.items() if one is not None}


class AdapterLoader:
    """Rank 0's loader of adapters, on all ranks. Used by the step loop's thread only, between steps."""

    def __init__(self, model: Transformer, controls: ControlSender) -> None:
        self._model, self._controls = model, controls
        self._is_alone = model.ranks.everyone.size == 1
        self._arranger = AdapterArranger(model)
        self._numbers = itertools.count()

    def begin(self, modules: AdapterModules) -> int:
        """Let all ranks begin to arrange their parts of an adapter, and return its number."""
        number = next(self._numbers)
        self._arranger.begin(number, modules)
        if not self._is_alone:
            self._controls.send(send_message(number, modules, self._model.adapters.dtype))
        return number

    def is_done(self, number: int) -> bool:
        """Return whether rank 0 has arranged its part, or has found that the adapter does not fit the model."""
        return self._arranger.is_done(number)

    def check(self, number: int) -> None:
        """Wait until rank 0 has arranged its part. Raises AdapterError if the adapter does not fit the model."""
        self._arranger.check(number)

    def drop(self, number: int) -> None:
        """Drop an adapter that was begun and is not loaded."""
        self._arranger.drop(number)
        self._controls.send(DropAdapter(number))

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

    def fill(self, slot: int, number: int) -> None:
        """Write an adapter that was begun into a slot on all ranks, and drop what is not needed any more.

        Waits for ranks that have not arranged their parts yet. Raises OutOfMemory if a rank has too little memory; the
        content of the slot is then undefined.
        """
        with self._controls.run_on_all_ranks(LoadAdapter(slot, number)), _as_out_of_memory():
            self._arranger.fill(number, slot)

    def close(self) -> None:
        """End rank 0's thread."""
        self._arranger.close()


def prepare_slots(share: Transformer | ExpertServer, message: LayOutAdapters) -> PreparedSlots:
    """Allocate the slots of a layout on this rank."""
    keys = frozenset((layer, Product(product)) for layer, product in message.keys)
    return share.adapters.prepare(keys, message.num_slots, message.rank, message.moves)


def send_message(number: int, modules: AdapterModules, dtype: torch.dtype) -> SendAdapter:
    """Return the message with an adapter; its matrices are sent in `dtype`, in which all ranks serve them."""
    sent = [
        SentModule(layer, name, down.shape[1], _bytes_of(down, dtype), _bytes_of(up, dtype))
        for (layer, name), (down, up) in modules.factors.items()
    ]
    return SendAdapter(number, modules.rank, sent)


def sent_modules(message: SendAdapter, dtype: torch.dtype) -> AdapterModules:
    """Return the adapter that `send_message` put into the message."""
    rank = message.rank
    return AdapterModules(
        rank,
        {
            (one.layer, one.name): (
                _tensor(one.down, dtype).view(rank, one.num_inputs),
                _tensor(one.up, dtype).view(-1, rank),
            )
            for one in message.modules
        },
    )


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

"""Background transfers of expert weights on one rank.

A move begins on all ranks between the same two steps. A thread of each rank then reads the source slots, exchanges
them over a separate process group, and keeps the result in spare buffers, while steps run. A transfer ends on no rank
before all ranks hold their experts. Later all ranks fill the slots and switch the table between the same two steps.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import torch

from moiety_engine.model.expert_migration import NO_TRANSFER, SlotTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moiety_engine.distribution.collectives import TransferGroup
    from moiety_engine.model.expert_migration import SlotWeights
    from moiety_engine.moe.expert_slots import ExpertSlots
    from moiety_placement.transition import Write

_END_S = 5.0  # longest wait at the end for a transfer that was begun


class TransferRefused(Exception):
    """A rank could not take part in a transfer, for example for lack of memory. Later ones may succeed."""


class ExpertHolder(Protocol):
    """A rank's share of the model."""

    device: torch.device

    def slots_of(self, layer: int) -> ExpertSlots | None: ...
    def slot_weights(self, layer: int) -> SlotWeights | None: ...


@dataclass(frozen=True, slots=True)
class _Begun:
    layer: int
    writes: Sequence[Write]
    weights: SlotWeights | None  # None on a rank without these weights
    ready: torch.cuda.Event | None  # on a GPU: steps that may still write the slots are launched before it
    ended: Future[_Ended]


@dataclass(frozen=True, slots=True)
class _Ended:
    transfer: SlotTransfer
    bytes_per_s: float | None  # None where this rank has exchanged nothing


class ExpertTransfers:
    """Transfers of one rank, one at a time. One thread begins and ends them; a thread of its own executes them."""

    def __init__(self, share: ExpertHolder, group: TransferGroup) -> None:
        self._share, self._group = share, group
        self._queue: SimpleQueue[_Begun | None] = SimpleQueue()
        self._begun: _Begun | None = None
        on_cuda = share.device.type == "cuda"
        self._stream = torch.cuda.Stream(share.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(target=self._run, name="expert-transfers", daemon=True)
        self._thread.start()

    def begin(self, layer: int, writes: Sequence[Write]) -> None:
        """Begin to transfer the weights of these writes. All ranks call it between the same two steps."""
        assert self._begun is None, "a transfer begins before the last one has ended"
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(self._share.device))
        self._begun = _Begun(layer, writes, self._share.slot_weights(layer), ready, Future())
        self._queue.put(self._begun)

    @property
    def is_done(self) -> bool:
        """Return whether the transfer has ended, on all ranks if it succeeded."""
        return self._begun is not None and self._begun.ended.done()

    def wait(self) -> float | None:
        """Wait for the transfer; return its speed on this rank in bytes per second, None if it moved no bytes here.

        Raises TransferRefused, and RuntimeError if the connections are broken.
        """
        assert self._begun is not None, "no transfer has begun"
        return self._begun.ended.result().bytes_per_s

    def end(self, *, commits: bool) -> None:
        """Fill the slots and switch the table of the layer, or discard the buffers of the transfer.

        All ranks call it between the same two steps; with `commits`, after the transfer has succeeded on rank 0.
        """
        begun = self._begun
        assert begun is not None, "no transfer has begun"
        if commits:
            transfer = begun.ended.result().transfer  # rank 0 may have seen the end a moment earlier
            if begun.weights is not None:
                begun.weights.fill(transfer.rows_B)
            slots = self._share.slots_of(begun.layer)
            if slots is not None:
                slots.write(begun.writes)
        self._begun = None

    def close(self) -> None:
        """End the thread, after the transfer that runs."""
        self._queue.put(None)
        self._thread.join(_END_S)

    def _run(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self._stream is not None:
                torch.cuda.set_device(self._share.device)
                stack.enter_context(torch.cuda.stream(self._stream))
            while (begun := self._queue.get()) is not None:
                try:
                    begun.ended.set_result(self._execute(begun))
                except (RuntimeError, MemoryError, TransferRefused) as exc:  # torch raises RuntimeError
                    begun.ended.set_exception(exc)

    def _execute(self, begun: _Begun) -> _Ended:
        """Transfer the weights, and return when all ranks have theirs. See `wait` for errors."""
        transfer, problem = NO_TRANSFER, None
        try:
            transfer = self._prepare(begun)
        except (RuntimeError, MemoryError) as exc:
            problem = exc
        if not self._group.all_succeeded(problem is None):
            reason = "another rank could not prepare a transfer of experts; see its log" if problem is None else problem
            raise TransferRefused(str(reason)) from problem
        begin_s = time.perf_counter()
        self._group.exchange(transfer.sends, transfer.receives)
        if self._stream is not None:
            self._stream.synchronize()
        took_s = time.perf_counter() - begin_s
        self._group.all_succeeded(True)  # returns once all ranks have come so far
        return _Ended(transfer, transfer.num_bytes / took_s if transfer.num_bytes else None)

    def _prepare(self, begun: _Begun) -> SlotTransfer:
        if begun.weights is None:
            return NO_TRANSFER
        if self._stream is not None and begun.ready is not None:
            self._stream.wait_event(begun.ready)
        return begun.weights.prepare(begun.writes)

"""Expert loaders: reads from a file by threads, or copies from page-locked host memory on separate CUDA streams."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from moiety_engine.offload.file import ExpertFile

READERS = 4


class LoadTicket(Protocol):
    """Handle of one requested expert load."""

    def wait(self) -> None:
        """Wait until the slot holds the expert for all later computation. Raises OSError."""

    def is_done(self) -> bool: ...

    def has_failed(self) -> bool:
        """Return whether the load failed, so that `wait` raises."""

    def cancel(self) -> bool:
        """Cancel the load if it has not begun; return whether the slot is unchanged."""


class ExpertLoader(Protocol):
    """Loader of experts into slots. Used by one thread."""

    def load_expert(self, layer: int, expert: int, slot: int, *, urgent: bool) -> LoadTicket:
        """Start to load an expert into a slot; urgent loads come first.

        All computation that reads the slot's old contents must be queued before the last `used`.
        """

    def used(self, layer: int) -> None:
        """Record that all computation with the layer's current slots has been queued on the device."""

    def close(self) -> None:
        """Stop the loader; no load is in flight afterwards."""


class FileExpertLoader:
    """Loader that reads from a file in threads; a caller that waits for a load not yet begun reads it itself."""

    def __init__(self, file: ExpertFile, slots: Sequence[Sequence[Tensor]]) -> None:
        """Start the reader threads.

        `slots`: the tensors of each layer with one slot per row, in the file's order.
        """
        self._file, self._slots = file, slots
        self._queue: deque[_Read] = deque()
        self._some = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._serve, name=f"expert-reader-{index}", daemon=True) for index in range(READERS)
        ]
        self._open = True
        for thread in self._threads:
            thread.start()

    def load_expert(self, layer: int, expert: int, slot: int, *, urgent: bool) -> LoadTicket:
        parts = self._file.layers[layer]
        into = [_memory_of(part[slot]) for part in self._slots[layer]]

        def read() -> None:
            for part, target in zip(parts, into, strict=True):
                self._file.read(part.offset + expert * target.nbytes, target)

        ticket = _Read(read)
        (self._queue.appendleft if urgent else self._queue.append)(ticket)
        self._some.release()
        return ticket

    def used(self, layer: int) -> None:
        """Do nothing: a CPU has finished its computation when the call returns."""

    def close(self) -> None:
        self._open = False
        for _ in self._threads:
            self._some.release()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while True:
            self._some.acquire()
            if not self._open:
                return
            self._queue.popleft().run()


def _memory_of(tensor: Tensor) -> memoryview:
    """Return the tensor's memory as bytes, without numpy, whose views would prevent sleep mode from releasing it."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class _Read:
    """Read that is executed once, by the thread that claims it."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._claim, self._done = threading.Lock(), threading.Event()
        self._problem: OSError | None = None

    def run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._job()
        except OSError as exc:
            self._problem = exc
        self._done.set()

    def wait(self) -> None:
        self.run()
        self._done.wait()
        if self._problem is not None:
            raise self._problem

    def is_done(self) -> bool:
        return self._done.is_set() and self._problem is None

    def has_failed(self) -> bool:
        return self._done.is_set() and self._problem is not None

    def cancel(self) -> bool:
        return self._claim.acquire(blocking=False)


class StreamExpertLoader:
    """Loader that copies from page-locked host memory while the device computes."""

    def __init__(self, hosts: Sequence[Sequence[Tensor]], slots: Sequence[Sequence[Tensor]]) -> None:
        """Create the copy streams.

        `hosts`: the tensors of each layer with one expert per row. `slots`: those with one slot per row.
        """
        self._hosts, self._slots = hosts, slots
        device = slots[0][0].device
        self._ahead: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._urgent: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._used = [torch.cuda.Event() for _ in slots]  # type: ignore[no-untyped-call]
        for layer in range(len(slots)):
            self.used(layer)

    def load_expert(self, layer: int, expert: int, slot: int, *, urgent: bool) -> LoadTicket:
        stream = self._urgent if urgent else self._ahead
        stream.wait_event(self._used[layer])
        with torch.cuda.stream(stream):
            for source, target in zip(self._hosts[layer], self._slots[layer], strict=True):
                target[slot].copy_(source[expert], non_blocking=True)
        return _Copy(stream.record_event())

    def used(self, layer: int) -> None:
        self._used[layer].record()

    def close(self) -> None:
        self._ahead.synchronize()
        self._urgent.synchronize()


class _Copy:
    def __init__(self, copied: torch.cuda.Event) -> None:
        self._copied = copied

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._copied)

    def is_done(self) -> bool:
        return bool(self._copied.query())  # type: ignore[no-untyped-call]

    def has_failed(self) -> bool:
        return False

    def cancel(self) -> bool:
        return False

"""How an expert comes into a slot: read from a file by threads, or copied from page-locked host memory on streams of
their own."""

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
    """Of an expert that was asked for."""

    def wait(self) -> None:
        """The slot holds it for whatever is computed from now on. Raises OSError."""

    def is_done(self) -> bool: ...

    def has_failed(self) -> bool:
        """Then `wait` raises."""

    def cancel(self) -> bool:
        """It is not wanted any more: whether its slot has stayed as it was."""


class ExpertLoader(Protocol):
    """Brings experts into slots. Used by one thread."""

    def bring(self, layer: int, expert: int, slot: int, *, urgent: bool) -> LoadTicket:
        """Begin; what is urgent goes before what is not. What reads the slot was queued before `used`."""

    def used(self, layer: int) -> None:
        """All that reads the layer's slots as they are now has been queued on the device."""

    def close(self) -> None:
        """Nothing is under way any more."""


class FileExpertLoader:
    """Reads from a file, as threads get to it; whoever waits for what no thread has begun reads it itself."""

    def __init__(self, file: ExpertFile, slots: Sequence[Sequence[Tensor]]) -> None:
        """`slots`: of each layer the tensors with a slot in each row, in the file's order."""
        self._file, self._slots = file, slots
        self._queue: deque[_Read] = deque()
        self._some = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._serve, name=f"expert-reader-{index}", daemon=True) for index in range(READERS)
        ]
        self._open = True
        for thread in self._threads:
            thread.start()

    def bring(self, layer: int, expert: int, slot: int, *, urgent: bool) -> LoadTicket:
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
        """A processor has computed what it was told to."""

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
    """Without numpy, whose views forbid for ever that the memory is given up while an engine sleeps."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class _Read:
    """A read that is done once, by whoever claims it."""

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
    """Copies from page-locked memory of the host, while the device computes."""

    def __init__(self, hosts: Sequence[Sequence[Tensor]], slots: Sequence[Sequence[Tensor]]) -> None:
        """Of each layer the tensors with an expert in each row, and those with a slot in each row."""
        self._hosts, self._slots = hosts, slots
        device = slots[0][0].device
        self._ahead: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._urgent: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._used = [torch.cuda.Event() for _ in slots]  # type: ignore[no-untyped-call]
        for layer in range(len(slots)):
            self.used(layer)

    def bring(self, layer: int, expert: int, slot: int, *, urgent: bool) -> LoadTicket:
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

"""Storage of the host-memory tier: KV blocks are copied out of the cache and back in.

Owns the host memory (page-locked beside a GPU) and a small staging buffer on the device. A block's data of all its
layers is contiguous in one row, so a block moves in one copy regardless of the number of layers. `cache.host` decides
which block goes where.

n blocks of a copy, E elements of a block over all layers, H host blocks of a slab.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from moiety_engine.model.batch import KvCache

SLAB_BYTES = 1 << 30  # page-locked memory is allocated in powers of two; slabs bound the waste to one slab
STAGING_BYTES = {"cuda": 64 << 20, "cpu": 8 << 20}  # for a few large copies instead of many small ones
NUM_MEASURED_BLOCKS = 32


class CopyMark:
    """Point in the copy stream of a HostKv; reports whether the copies before it have run. Thread-safe."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def is_over(self) -> bool:
        """Return whether the copies before the mark have run."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the copies before the mark have run."""
        if self._event is not None:
            self._event.synchronize()


class HostKv:
    """Host memory for `num_blocks` blocks of a cache. Used by the step loop's thread only."""

    def __init__(
        self, kv: KvCache, num_blocks: int, *, slab_bytes: int = SLAB_BYTES, staging_bytes: int | None = None
    ) -> None:
        first = kv.layers[0].parts[0]
        self._kv = kv
        # all viewed as one dtype: an int8 cache has scales of another dtype
        self._views = [part.flatten(1).view(first.dtype) for layer in kv.places for part in layer.parts]
        self.block_bytes = self.bytes_of_a_block(kv)
        width = self.block_bytes // first.element_size()
        on_cuda = first.device.type == "cuda"
        self.num_blocks = num_blocks
        self._rows_per_slab = max(1, slab_bytes // self.block_bytes)
        starts = range(0, num_blocks, self._rows_per_slab)
        self._slabs_HE = [
            torch.empty(min(self._rows_per_slab, num_blocks - start), width, dtype=first.dtype, pin_memory=on_cuda)
            for start in starts
        ]
        staging_bytes = STAGING_BYTES[first.device.type] if staging_bytes is None else staging_bytes
        self._staging_nE = torch.empty(
            max(1, staging_bytes // self.block_bytes), width, dtype=first.dtype, device=first.device
        )
        self._device = first.device
        self._stream = torch.cuda.Stream(self._device) if on_cuda else None  # type: ignore[no-untyped-call]

    @staticmethod
    def bytes_of_a_block(kv: KvCache) -> int:
        """Return the bytes of one block."""
        return sum(part[0].numel() * part.element_size() for layer in kv.places for part in layer.parts)

    def view(self, host_block: int) -> memoryview:
        """Return the bytes of a host block, readable and writable.

        The caller ensures that no copy of the block is running.
        """
        slab, row = divmod(host_block, self._rows_per_slab)
        return self._slabs_HE[slab][row].view(torch.uint8).numpy().data

    def mark(self) -> CopyMark:
        """Return a mark that is over once all copies queued so far have run."""
        return CopyMark(None if self._stream is None else self._stream.record_event())

    def run_own(self, group: int, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> None:
        """Run those of a plan's copies that belong to this rank group.

        Each group's blocks are numbered after those of the groups before it, on the device and on the host.
        """
        device, host = group * self._kv.num_blocks, group * self.num_blocks
        held = range(device, device + self._kv.num_blocks)
        self.run(
            [(block - device, to - host) for block, to in outs if block in held],
            [(source - host, block - device) for source, block in ins if block in held],
        )

    @torch.inference_mode()
    def run(self, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> None:
        """Copy `outs` (device block, host block), then `ins` (host block, device block).

        On a GPU this returns at once; the copies run on a separate stream. Work queued on the current stream afterwards
        sees the blocks copied in and may overwrite those copied out, and waits only as long as that requires.
        """
        if not outs and not ins:
            return
        stream = self._stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._on_stream():
            for device_ids, host_ids in _portions(outs, len(self._staging_nE)):
                self._gather(device_ids)
                if stream is not None:
                    ready = stream.record_event()
                for slab_HE, row, first, count in self._runs(host_ids):
                    slab_HE[row : row + count].copy_(self._staging_nE[first : first + count], non_blocking=True)
            swapped = [(device, host) for host, device in ins]
            for device_ids, host_ids in _portions(swapped, len(self._staging_nE)):
                for slab_HE, row, first, count in self._runs(host_ids):
                    self._staging_nE[first : first + count].copy_(slab_HE[row : row + count], non_blocking=True)
                self._scatter(device_ids)
                if stream is not None:
                    ready = stream.record_event()
        if stream is not None:
            torch.cuda.current_stream(self._device).wait_event(ready)

    def measure_bandwidth(self) -> float:
        """Return the bytes per second of swapping a few blocks out and in.

        Overwrites host blocks. Call it only before the first request.
        """
        count = min(NUM_MEASURED_BLOCKS, self.num_blocks, self._kv.num_blocks)
        pairs = [(block, block) for block in range(count)]
        self.run(pairs, pairs)  # the first access to the memory costs more than later copies
        self._synchronize()
        begin = time.perf_counter()
        self.run(pairs, pairs)
        self._synchronize()
        return 2 * count * self.block_bytes / (time.perf_counter() - begin)

    def _gather(self, device_ids: list[int]) -> None:
        """Copy device blocks into the first rows of the staging buffer."""
        ids_n = self._on_device(device_ids)
        begin = 0
        for view in self._views:
            end = begin + view.shape[1]
            self._staging_nE[: len(device_ids), begin:end] = view.index_select(0, ids_n)
            begin = end

    def _scatter(self, device_ids: list[int]) -> None:
        """Copy the first rows of the staging buffer into device blocks."""
        ids_n = self._on_device(device_ids)
        begin = 0
        for view in self._views:
            end = begin + view.shape[1]
            view.index_copy_(0, ids_n, self._staging_nE[: len(device_ids), begin:end])
            begin = end

    def _on_device(self, ids: list[int]) -> Tensor:
        locked = torch.tensor(ids, pin_memory=self._stream is not None)  # a copy from pageable memory would block
        return locked.to(self._device, non_blocking=True)

    def _runs(self, host_ids: list[int]) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yield runs of consecutive host blocks: (slab, its first row, first staging row, count). A run is one copy."""
        first = 0
        while first < len(host_ids):
            slab, row = divmod(host_ids[first], self._rows_per_slab)
            limit = min(len(host_ids) - first, self._rows_per_slab - row)
            count = 1
            while count < limit and host_ids[first + count] == host_ids[first] + count:
                count += 1
            yield self._slabs_HE[slab], row, first, count
            first += count

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _portions(pairs: list[tuple[int, int]], size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (device blocks, host blocks), sorted by host block, in portions that fit the staging buffer."""
    ordered = sorted(pairs, key=lambda pair: pair[1])
    for begin in range(0, len(ordered), size):
        portion = ordered[begin : begin + size]
        yield [device for device, _ in portion], [host for _, host in portion]

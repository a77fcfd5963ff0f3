"""Copy of a sleeping model's weights in a file, so that they need neither device memory nor host memory."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from shutil import disk_usage

import torch
from torch import Tensor

from moiety_engine.errors import OutOfMemory
from moiety_engine.memory import available_bytes

_CHUNK_BYTES = 64 << 20
_SYNC_BYTES = 512 << 20  # written before the disk must have them: neither a long wait nor many pages of host memory
TOO_SHORT = "it is too short"
_ADVICE = "Free space there, or set another --sleep-folder"

Storages = list[torch.UntypedStorage]


class WeightFile:
    """File without a name, which only this process can read and which ends with it."""

    def __init__(self, folder: str, num_bytes: int) -> None:
        """Create the folder and the file. Raises OutOfMemory without `num_bytes` of free space, or if it cannot."""
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            free_bytes = disk_usage(folder).free
            if num_bytes >= free_bytes:
                raise OutOfMemory(
                    f"the weights need {num_bytes / 2**30:.2f} GiB, but {free_bytes / 2**30:.2f} GiB of {folder} are "
                    f"free: they stay on the device. {_ADVICE}"
                )
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  closed by `close`
        except OSError as exc:
            raise _not_written(folder, exc) from exc
        self._folder, self._sizes = folder, list[int]()

    def move(self, storages: Storages, on_progress: Callable[[], None]) -> None:
        """Write the weights, then release their memory. `on_progress` is called after each chunk.

        Raises OutOfMemory, and releases nothing, if they cannot be written.
        """
        num_unsynced = 0
        try:
            for part in chain.from_iterable(map(_parts_of, storages)):
                _transfer(part.to("cpu"), self._file.write)
                num_unsynced += part.nbytes
                if num_unsynced >= _SYNC_BYTES:
                    self._sync()
                    num_unsynced = 0
                on_progress()
            self._sync()
        except OSError as exc:
            self.close()
            raise _not_written(self._folder, exc) from exc
        self._sizes = [storage.nbytes() for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def read(self, storages: Storages, on_progress: Callable[[], None]) -> None:
        """Allocate the memory of the weights and read them. `on_progress` is called after each chunk.

        Raises OutOfMemory if a CPU's memory does not suffice, and OSError if the file cannot be read.
        """
        is_host = all(storage.device.type == "cpu" for storage in storages)
        if is_host and (num_bytes := sum(self._sizes)) >= available_bytes():
            wanted, free = (f"{one / 2**30:.2f} GiB" for one in (num_bytes, available_bytes()))
            raise OutOfMemory(
                f"the weights need {wanted}, but {free} of the host's memory are free: end other programs"
            )
        self._file.seek(0)
        for storage, num_bytes in zip(storages, self._sizes, strict=True):
            storage.resize_(num_bytes)
            for part in _parts_of(storage):
                buffer = part if is_host else torch.empty_like(part, device="cpu")
                _transfer(buffer, self._file.readinto)
                if not is_host:
                    part.copy_(buffer)
                on_progress()

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def _sync(self) -> None:
        """Wait until the disk has what was written, and free the page cache of it."""
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _parts_of(storage: torch.UntypedStorage) -> Iterator[Tensor]:
    """Return the storage as tensors of at most `_CHUNK_BYTES`."""
    whole = bytes_of(storage)
    return (whole[first : first + _CHUNK_BYTES] for first in range(0, len(whole), _CHUNK_BYTES))


def _transfer(part: Tensor, transfer: Callable[[memoryview], int | None]) -> None:
    """Write or read the memory of a tensor on the host, in as many calls as the file needs."""
    memory = memoryview((ctypes.c_ubyte * part.nbytes).from_address(part.data_ptr())).cast("B")
    while memory:
        num_done = transfer(memory)
        if not num_done:
            raise OSError(TOO_SHORT)
        memory = memory[num_done:]


def _not_written(folder: str, exc: OSError) -> OutOfMemory:
    return OutOfMemory(
        f"the weights cannot be written to {folder}: {exc.strerror or exc}; they stay on the device. {_ADVICE}"
    )

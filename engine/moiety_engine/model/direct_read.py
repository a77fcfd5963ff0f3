"""Direct read of tensors whose stored form is the wanted one: several threads read them into their final memory.

With a memory map, torch's threads would copy the same bytes after a page fault for each page, and synchronize after
each tensor.
"""

from __future__ import annotations

import ctypes
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moiety_engine.model.errors import WeightsError
from moiety_engine.model.names.tensor_mapping import TensorMapping
from moiety_kernels.cpu import pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from moiety_engine.model.names.tensor_mapping import Shares

MAX_AT_ONCE = 16 << 20  # bytes per part; a thread reads one part at a time
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class _ReadPart(NamedTuple):
    path: Path
    offset: int  # in the file
    target: memoryview


class DirectRead:
    """Collection of tensors that can be read directly."""

    def __init__(self, most_at_once: int = MAX_AT_ONCE) -> None:
        self._most_at_once = most_at_once
        self._parts: list[_ReadPart] = []
        self._views: list[Tensor] = []
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}

    def take(self, path: Path, name: str, place: TensorMapping | Shares) -> bool:
        """Add the tensor `name` in the file if it is wanted unchanged and in host memory; return whether it was added.

        `read` reads the added tensors.
        """
        if not isinstance(place, TensorMapping) or place.arrange is not None or place.chosen is not None:
            return False
        view = place.view
        begin, header = self._header(path)
        entry = header[name]
        as_it_is = view.is_cpu and view.is_contiguous() and _DTYPES.get(entry["dtype"]) is view.dtype
        if not as_it_is or tuple(entry["shape"]) != place.shape or tuple(view.shape) != place.shape or not view.numel():
            return False
        first, end = entry["data_offsets"]
        if end - first != view.nbytes:
            return False
        target = _memory_of(view)
        for at in range(0, len(target), self._most_at_once):
            self._parts.append(_ReadPart(path, begin + first + at, target[at : at + self._most_at_once]))
        self._views.append(view)
        return True

    def read(self, num_threads: int) -> Iterator[int]:
        """Read all added tensors; yield the bytes of each part. Raises WeightsError if a file is truncated."""
        pages.request_large_pages(self._views)
        with ExitStack() as stack:
            files = {}
            for path in {part.path for part in self._parts}:
                files[path] = os.open(path, os.O_RDONLY)
                stack.callback(os.close, files[path])
            with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as threads:
                yield from threads.map(lambda part: _read(part, files[part.path]), self._parts)

    def _header(self, path: Path) -> tuple[int, dict[str, Any]]:
        """Return the offset of a file's tensor data, and the header's entry of each tensor."""
        if path not in self._headers:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._headers[path] = 8 + length, json.loads(file.read(length))
        return self._headers[path]


def _memory_of(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes, valid while it exists; a numpy view would prevent the release of its storage."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _read(part: _ReadPart, file: int) -> int:
    done, size = 0, len(part.target)
    while done < size:
        count = os.preadv(file, [part.target[done:]], part.offset + done)
        if not count:
            raise WeightsError(f"{part.path} is not a complete safetensors file; download it again")
        done += count
    return size

"""Tensors that are wanted just as a safetensors file holds them: read by several threads, straight to where they
belong. Through a memory map torch's threads would copy the same bytes, page after page of which the system first has to
find; and wait for each other after each tensor."""

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

MOST_AT_ONCE = 16 << 20  # bytes that a thread reads before it takes the next part
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class _ReadPart(NamedTuple):
    path: Path
    offset: int  # in the file
    target: memoryview


class DirectRead:
    """Collects what can be read so, and then reads it."""

    def __init__(self, most_at_once: int = MOST_AT_ONCE) -> None:
        self._most_at_once = most_at_once
        self._parts: list[_ReadPart] = []
        self._views: list[Tensor] = []
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}

    def take(self, path: Path, name: str, place: TensorMapping | Shares) -> bool:
        """Whether the tensor of that name in the file is wanted as it is, in host memory: then `read` reads it."""
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
        """Read all that was taken; yields the bytes of each part. Raises WeightsError where a file ends too soon."""
        pages.prefer(self._views)
        with ExitStack() as stack:
            files = {}
            for path in {part.path for part in self._parts}:
                files[path] = os.open(path, os.O_RDONLY)
                stack.callback(os.close, files[path])
            with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as threads:
                yield from threads.map(lambda part: _read(part, files[part.path]), self._parts)

    def _header(self, path: Path) -> tuple[int, dict[str, Any]]:
        """Where a file's tensors begin, and what it says of each."""
        if path not in self._headers:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._headers[path] = 8 + length, json.loads(file.read(length))
        return self._headers[path]


def _memory_of(tensor: Tensor) -> memoryview:
    """Its bytes, for as long as it is there. As an array of numpy's its storage could not be given up any more."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _read(part: _ReadPart, file: int) -> int:
    done, size = 0, len(part.target)
    while done < size:
        count = os.preadv(file, [part.target[done:]], part.offset + done)
        if not count:
            raise WeightsError(f"{part.path} is not a whole safetensors file; fetch it again")
        done += count
    return size

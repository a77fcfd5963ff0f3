"""Reader of a GGUF file's header: metadata, and the type, shape and place of each tensor.

The `gguf` package keeps an object and several arrays for each metadata value, which takes seconds for a vocabulary, and
trusts the counts in a file. This reader checks every count against the bytes that are left before it reads on.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moiety_engine.errors import CheckpointError
from moiety_engine.gguf.block_types import TYPES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20
_MAX_ENTRIES, _MAX_TENSORS, _MAX_VALUES = 10_000, 200_000, 4 << 20
_MAX_KEY_BYTES, _MAX_DIMENSIONS, _MAX_EXPERTS = 65_535, 4, 65_536
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_SPLITS = 1000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Place of a tensor. `shape`: the last dimension is contiguous; `offset` and `num_bytes` in the file."""

    path: Path
    type: BlockType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key, and the tensors by name; of a model in several files those of all files."""

    paths: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of `key` after the architecture's prefix."""
        return self.metadata.get(f"{self.architecture}.{key}", default)


def read_header(path: Path) -> GgufHeader:
    """Return the header of a GGUF file, or of all files of a model of which `path` is the first.

    Raises CheckpointError if a file is damaged, incomplete, missing, or has tensors of a type that is not read.
    """
    try:
        state = path.stat()
        return _read_all(path.absolute(), state.st_size, state.st_mtime_ns)
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc


@lru_cache(maxsize=2)
def _read_all(path: Path, _size: int, _modified: int) -> GgufHeader:
    paths = split_paths(path)
    first, *others = [_read_one(one) for one in paths]
    if len(paths) == 1 and int(first.metadata.get("split.count", 1)) > 1:
        raise CheckpointError(
            f"{path} is one of {first.metadata['split.count']} files: give the first, …-00001-of-….gguf"
        )
    tensors = dict(first.tensors)
    for other in others:
        if repeated := tensors.keys() & other.tensors.keys():
            raise CheckpointError(f"{other.paths[0]} repeats the tensor {min(repeated)}; download the files again")
        tensors |= other.tensors
    return GgufHeader(tuple(paths), first.metadata, tensors)


def split_paths(path: Path) -> list[Path]:
    """Return the files of the model whose first file is `path`. Raises CheckpointError."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if int(match["number"]) != 1 or not 0 < count <= _MAX_SPLITS:
        raise CheckpointError(f"{path} is not the first file of its model: give …-00001-of-{match['count']}.gguf")
    paths = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = next((one for one in paths if not one.is_file()), None)
    if missing is not None:
        raise CheckpointError(f"{missing} is missing: a model in {count} files needs all of them in one folder")
    return paths


def _read_one(path: Path) -> GgufHeader:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path} is empty; download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Parser(path, data).header()
            except (struct.error, UnicodeDecodeError, _Damaged) as exc:
                raise CheckpointError(f"{path} is not a complete GGUF file ({exc}); download it again") from exc


class _Damaged(Exception):
    """A header contradicts itself or the size of its file."""


class _Parser:
    """Reader of one file's header, from its beginning."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0
        self._end = min(len(data), MAX_HEADER_BYTES)

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise _Damaged("it does not begin with GGUF")
        (version,) = self._numbers("I", 1)
        if version not in VERSIONS:
            raise _Damaged(f"its version is {version}, but {' and '.join(map(str, VERSIONS))} are read")
        num_tensors, num_entries = self._numbers("Q", 2)
        if num_tensors > _MAX_TENSORS or num_entries > _MAX_ENTRIES:
            raise _Damaged(f"it has {num_tensors} tensors and {num_entries} metadata entries")
        metadata = {}
        for _ in range(num_entries):
            key = self._string(_MAX_KEY_BYTES)
            metadata[key] = self._value(*self._numbers("I", 1))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise _Damaged(f"its alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors = {}
        for name, kind, shape, offset in entries:
            num_bytes = math.prod(shape) // kind.numbers * kind.num_bytes
            if name in tensors or begin + offset + num_bytes > len(self._data):
                raise _Damaged(f"the tensor {name!r} occurs twice or ends beyond the file")
            tensors[name] = TensorEntry(self._path, kind, shape, begin + offset, num_bytes)
        return GgufHeader((self._path,), metadata, tensors)

    def _entry(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        name = self._string(_MAX_KEY_BYTES)
        (num_dimensions,) = self._numbers("I", 1)
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            raise _Damaged(f"the tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(reversed(self._numbers("Q", num_dimensions)))
        (number,) = self._numbers("I", 1)
        (offset,) = self._numbers("Q", 1)
        if number not in TYPES:
            known = ", ".join(kind.name for kind in TYPES.values())
            raise CheckpointError(
                f"{self._path} has the tensor {name} in GGUF's type {number}, which is not supported; supported "
                f"types are {known}: "
                "use a file of one of those, such as Q4_K_M, or convert it with llama-quantize"
            )
        kind = TYPES[number]
        too_many = (len(shape) > 2 or "_exps." in name) and (len(shape) < 2 or shape[0] > _MAX_EXPERTS)
        if shape[-1] % kind.numbers or any(side == 0 for side in shape) or too_many:
            raise _Damaged(f"the tensor {name!r} of type {kind.name} has the shape {shape}")
        return name, kind, shape, offset

    def _value(self, kind: int, *, in_array: bool = False) -> Any:
        if kind == _STRING:
            return self._string(self._end)
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind], 1)[0]
        if kind != _ARRAY or in_array:
            raise _Damaged(f"a value has the type {kind}")
        (of,) = self._numbers("I", 1)
        (count,) = self._numbers("Q", 1)
        if count > min(_MAX_VALUES, self._end - self._at):
            raise _Damaged(f"an array has {count} values")
        if of in _NUMBERS:
            return list(self._numbers(_NUMBERS[of], count))
        return [self._value(of, in_array=True) for _ in range(count)]

    def _string(self, most_bytes: int) -> str:
        (length,) = self._numbers("Q", 1)
        if length > most_bytes:
            raise _Damaged(f"a text has {length} bytes")
        return self._take(length).decode()

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._end - self._at:
            raise _Damaged(f"it ends after {self._end} bytes, within its header")
        part = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return part

"""File of a model's experts in their in-memory layout, so that an expert is read directly into its slot.

The file is written once, while a checkpoint is loaded, and found at the next start by a key that identifies its source.
An index file accompanies it; an expert file without an index was never finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import secrets
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from moiety_engine.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

_VERSION = 1  # of the file's layout
_UNLOCKED_S = 60.0  # age from which a new file counts as abandoned: its process would have locked it by then
_READ_BYTES = 8 << 20  # per read, after which its pages in the page cache are dropped


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """Tensor in the file, with one expert per row of its first dimension."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str  # as torch names it

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class ExpertFile:
    """Expert store on disk.

    `layers`: the expert tensors of each MoE layer; empty until the file is finished.
    """

    def __init__(self, folder: Path, key: str) -> None:
        """Open the finished file of `key` in `folder`, or create a new one.

        Raises InvalidConfig if the folder cannot be written to.
        """
        self._path, self._index = folder / f"experts-{key}.bin", folder / f"experts-{key}.json"
        self._partial = folder / f"experts-{key}.{secrets.token_hex(8)}.partial"
        self.layers: list[list[ExpertTensor]] = []
        self._mapped: dict[int, tuple[int, mmap.mmap]] = {}  # file offset and mapping by address
        self._end = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder)
            found = self._read_index()
            new = self._partial.with_suffix(".new")
            path, flags = (new, os.O_RDWR | os.O_CREAT | os.O_EXCL) if found is None else (self._path, 0)
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
            if found is None:  # lock it before the rename: a locked .partial file does not count as abandoned
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                new.rename(self._partial)
        except OSError as exc:
            raise InvalidConfig(
                f"experts cannot be stored in {folder} ({exc}): choose another --offload-folder"
            ) from exc
        if found is not None:
            self.layers = found
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    @property
    def is_whole(self) -> bool:
        return bool(self.layers)

    def _read_index(self) -> list[list[ExpertTensor]] | None:
        """Return the layers of a file that an earlier start finished; None if there is none."""
        try:
            known = json.loads(self._index.read_text(encoding="utf-8"))
            if known["version"] != _VERSION or self._path.stat().st_size != known["bytes"]:
                return None
            return [
                [ExpertTensor(**(part | {"shape": tuple(part["shape"])})) for part in layer]
                for layer in known["layers"]
            ]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    # ── writing ──

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor that is mapped to a new region of the file.

        Raises InvalidConfig if the disk has no space for it.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        try:
            os.posix_fallocate(self._fd, self._end, num_bytes)  # a write to a mapping on a full disk raises SIGBUS
        except OSError as exc:
            self._partial.unlink(missing_ok=True)
            others = sorted(one.name for one in self._path.parent.glob("experts-*.bin"))
            advice = "free space there" + (f" (unused files may be: {', '.join(others)})" if others else "")
            raise InvalidConfig(
                f"the experts do not fit on the disk of {self._path.parent} ({exc}): {advice}, or choose "
                "another --offload-folder"
            ) from exc
        mapping = mmap.mmap(self._fd, num_bytes, offset=self._end)
        tensor = torch.frombuffer(mapping, dtype=torch.uint8).view(dtype).view(shape)
        self._mapped[tensor.data_ptr()] = self._end, mapping
        self._end += -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `empty` returned this tensor."""
        return tensor.data_ptr() in self._mapped

    def finish(self, layers: Sequence[Mapping[str, Tensor]]) -> None:
        """Flush the file and write its index, so that later starts find it.

        The tensors must come from `empty` and be filled.
        """
        self.layers = [
            [
                ExpertTensor(
                    name, self._mapped[one.data_ptr()][0], tuple(one.shape), str(one.dtype).removeprefix("torch.")
                )
                for name, one in layer.items()
            ]
            for layer in layers
        ]
        for _, mapping in self._mapped.values():
            mapping.flush()
            mapping.madvise(mmap.MADV_DONTNEED)
        self._mapped.clear()
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        index = {
            "version": _VERSION,
            "bytes": os.fstat(self._fd).st_size,
            "layers": [[asdict(part) for part in layer] for layer in self.layers],
        }
        written = self._partial.with_suffix(".index")
        written.write_text(json.dumps(index), encoding="utf-8")
        self._index.unlink(missing_ok=True)
        self._partial.replace(self._path)
        written.replace(self._index)

    # ── reading ──

    def read(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` of the file. Callable from any thread. Raises OSError.

        The pages read are dropped from the page cache, so that memory use stays within the expert cache's budget.
        """
        done, size = 0, target.nbytes
        while done < size:
            num = os.preadv(self._fd, [target[done : done + _READ_BYTES]], offset + done)
            if not num:
                raise OSError(f"{self._path} is incomplete: delete it and start again")
            os.posix_fadvise(self._fd, offset + done, num, os.POSIX_FADV_DONTNEED)
            done += num

    def close(self) -> None:
        os.close(self._fd)
        self._partial.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    """Delete files that processes which no longer run left unfinished."""
    for path in (*folder.glob("experts-*.new"), *folder.glob("experts-*.index")):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _UNLOCKED_S:
                path.unlink()
    for path in folder.glob("*.partial"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()

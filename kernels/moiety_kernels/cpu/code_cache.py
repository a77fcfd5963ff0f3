"""Folder of compiled CPU kernels, which several processes read and write at once.

numba keeps the compiled code of a function in numbered files, and an index of them by signature and CPU. It writes both
without a lock: two processes that compile the function for different signatures may choose the same number, and the
index of one then names the code of the other. Here a process holds a lock while it saves, and the index never names a
file that is not written yet.

The folder is in the package. Where this is read-only, as in an image, what was compiled into it is used, and further
code is kept in the user's cache folder. The code is that of a CPU level (`levels.py`) and serves every CPU of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba import config
from numba.core import caching

from moiety_kernels.cpu.instructions import ARM, ARM_FEATURE, EMULATED

if TYPE_CHECKING:
    from collections.abc import Iterator

_OBJECT_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_CacheFile: Any = caching.IndexDataCacheFile  # whose methods have no types


@functools.cache
def use_cache() -> bool:
    """Point numba at a folder for compiled code; return whether there is one. Without it, every start recompiles.

    The folder's name contains a digest of all sources: numba itself checks only the file of the function that it
    compiles, not the files of the functions called from there.
    """
    package = Path(__file__).parent.parent
    kinds = EMULATED | ({ARM_FEATURE} if ARM else set())  # of code; numba knows the features of the compiler
    digest = hashlib.sha256(",".join(sorted(kinds)).encode())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    in_package = package / "__pycache__" / name
    for parent in (in_package.parent, Path("~/.cache/moiety")):
        try:
            folder = parent.expanduser() / name
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # read-only, or the user has no home
            continue
        if os.access(folder, os.W_OK):
            config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
            SharedCacheFile.read_only = in_package if folder != in_package and in_package.is_dir() else None
            vars(caching)["IndexDataCacheFile"] = SharedCacheFile  # which numba looks up for each function
            return True
    return False


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created. Holds none where the file or its lock cannot be had."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # as of a full disk, another user's file, or a file system without locks
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # closing is not enough where a child was forked meanwhile
        yield


class SharedCacheFile(_CacheFile):  # type: ignore[misc]
    """Index and code files of one function, which several processes may save at the same time."""

    read_only: Path | None = None  # folder beside the one that is written, whose code is used as well

    def __init__(self, cache_path: str, filename_base: str, source_stamp: Any) -> None:
        super().__init__(cache_path, filename_base, source_stamp)
        self._read_only: Any = None
        written, folder = Path(config.CACHE_DIR), Path(cache_path)  # type: ignore[attr-defined]
        if self.read_only is not None and folder.is_relative_to(written):
            self._read_only = _CacheFile(str(self.read_only / folder.relative_to(written)), filename_base, source_stamp)

    def load(self, key: Any) -> Any:
        """Return the code of a signature and CPU, or None."""
        found = super().load(key)
        return self._read_only.load(key) if found is None and self._read_only is not None else found

    def save(self, key: Any, data: tuple[Any, ...]) -> None:
        """Add the code of a signature and CPU."""
        with locked(Path(f"{self._index_path}.lock")):
            known = self._load_index()
            taken, number = set(known.values()), 1
            while self._data_name(number) in taken:
                number += 1
            name = known.get(key) or self._data_name(number)
            self._save_data(name, tuple(map(_without_addresses, data)))
            self._save_index({**known, key: name})


def _without_addresses(part: Any) -> Any:
    """Return numba's description of types without the addresses of objects, so that equal code gives equal files."""
    return _OBJECT_ADDRESS.sub("", part) if isinstance(part, str) else part

"""Folder of compiled CPU kernels, which several processes read and write at once.

numba keeps the compiled code of a function in numbered files, and an index of them by signature and CPU. It writes both
without a lock: two processes that compile the function for different signatures may choose the same number, and the
index of one then names the code of the other. Here a process holds a lock while it saves, and the index never names a
file that is not written yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numba import config
from numba.core import caching

from moiety_kernels.cpu.instructions import ARM, ARM_FEATURE, EMULATED

if TYPE_CHECKING:
    from collections.abc import Iterator

_CacheFile: Any = caching.IndexDataCacheFile  # whose methods have no types


@functools.cache
def use_cache() -> bool:
    """Point numba at a folder for compiled code; return whether there is one. Without it, every start recompiles.

    The folder's name holds a digest of all sources: numba itself checks only the file of the function that it compiles,
    not the files of the functions called from there.
    """
    package = Path(__file__).parent.parent
    kinds = EMULATED | ({ARM_FEATURE} if ARM else set())  # of code; numba knows the features of the compiler
    digest = hashlib.sha256(",".join(sorted(kinds)).encode())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    for parent in (package / "__pycache__", Path("~/.cache/moiety")):
        try:
            folder = parent.expanduser() / f"kernels-{digest.hexdigest()[:16]}"
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # read-only, or the user has no home
            continue
        if os.access(folder, os.W_OK):
            config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
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

    def save(self, key: Any, data: Any) -> None:
        """Add the code of a signature and CPU."""
        with locked(Path(f"{self._index_path}.lock")):
            known = self._load_index()
            taken, number = set(known.values()), 1
            while self._data_name(number) in taken:
                number += 1
            name = known.get(key) or self._data_name(number)
            self._save_data(name, data)
            self._save_index({**known, key: name})

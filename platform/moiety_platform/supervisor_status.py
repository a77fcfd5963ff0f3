"""Counts of the supervisor of `moiety serve`, in a file that it overwrites in place and the gateway reads.

The file has its full size from the start, so that a disk that becomes full does not stop the counts.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path

SIZE_BYTES = 4096
EXIT, HANG = "exit", "hang"  # reasons of a restart


class SupervisorStatus:
    """Counts of one supervisor: restarts by process and reason, and output bytes that were lost by process.

    Owned by the supervisor; for several threads. Updates fail open: counts that cannot be written are written with the
    next change.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._restarts: Counter[tuple[str, str]] = Counter()
        self._lost: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.problem = ""  # why the file is not up to date
        self._write()

    def count_restart(self, process: str, reason: str) -> None:
        with self._lock:
            self._restarts[process, reason] += 1
            self._write()

    def count_lost(self, process: str, num_bytes: int) -> None:
        with self._lock:
            self._lost[process] += num_bytes
            self._write()

    def _write(self) -> None:
        restarts = [[process, reason, count] for (process, reason), count in sorted(self._restarts.items())]
        text = json.dumps({"restarts": restarts, "lost_bytes": sorted(self._lost.items())})
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(fd, text.encode().ljust(SIZE_BYTES), 0)
            finally:
                os.close(fd)
        except OSError as exc:
            self.problem = exc.strerror or type(exc).__name__
        else:
            self.problem = ""


def read_status(path: Path) -> tuple[list[tuple[str, str, int]], list[tuple[str, int]]]:
    """Return restarts as (process, reason, count), and lost bytes by process. Raises OSError or ValueError."""
    document = json.loads(path.read_bytes()[:SIZE_BYTES])
    restarts = [(str(process), str(reason), int(count)) for process, reason, count in document["restarts"]]
    return restarts, [(str(process), int(count)) for process, count in document["lost_bytes"]]

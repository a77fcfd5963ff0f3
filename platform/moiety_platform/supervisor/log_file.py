"""Log file of one process: appended to, rotated by size and by age, and opened again on request.

The files are NAME.log and the rotated NAME.log.1 (the newest) to NAME.log.N.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
FIRST_TIME = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LogRotation:
    """Time at which a log is rotated, and the number of rotated files that are kept. `max_age_s` 0: not by age."""

    max_bytes: int = 16 * 1024 * 1024
    max_age_s: float = 0.0
    num_kept: int = 5


class LogFile:
    """Log file of one process. `write` raises OSError and can be called again; for one thread.

    `reopen` can be called on any thread.
    """

    def __init__(self, path: Path, rotation: LogRotation, now: Callable[[], float] = time.time) -> None:
        """`now` returns the time in seconds since the epoch."""
        self.path = path
        self._rotation = rotation
        self._now = now
        self._fd: int | None = None
        self._num_bytes = 0
        self._begun_at = 0.0
        self._must_reopen = False
        self._lost = 0, ""  # bytes that could not be written since the last success, and the reason

    def reopen(self) -> None:
        """Open the path again before the next write: a program has renamed the file."""
        self._must_reopen = True

    def write(self, block: bytes) -> None:
        """Append the block; before it, say how many bytes are missing. An empty block only opens the file."""
        try:
            self._open()
            num_lost, reason = self._lost
            if num_lost:
                self._append(_loss_line(num_lost, reason, self._now()))
                self._lost = 0, ""
            self._append(block)
        except OSError as exc:
            self._lost = self._lost[0] + len(block), exc.strerror or type(exc).__name__
            raise

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        if self._fd is not None:
            with contextlib.suppress(OSError):  # a deferred error of earlier writes
                os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        if self._must_reopen:
            self._must_reopen = False
            self.close()
        if self._fd is None:
            self._fd = os.open(self.path, FLAGS, 0o600)
            self._num_bytes = os.fstat(self._fd).st_size
            self._begun_at = self._read_begin()
        if self._is_due():
            self._rotate()

    def _is_due(self) -> bool:
        """Return whether the file must be rotated. An empty file never is."""
        rotation = self._rotation
        is_old = 0 < rotation.max_age_s <= self._now() - self._begun_at
        return self._num_bytes > 0 and (self._num_bytes >= rotation.max_bytes or is_old)

    def _rotate(self) -> None:
        """Rename the files and open a new one. If that fails, the current file is continued."""
        try:
            if self.path.exists():  # else only the new file is missing, which could not be created before
                if self._rotation.num_kept == 0:
                    self.path.unlink()
                for index in range(self._rotation.num_kept - 1, -1, -1):
                    older = self._rotated(index)
                    if older.exists():
                        older.replace(self._rotated(index + 1))
            fd = os.open(self.path, FLAGS, 0o600)
        except OSError:
            return
        self.close()
        self._fd, self._num_bytes, self._begun_at = fd, 0, self._now()

    def _rotated(self, index: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{index}") if index else self.path

    def _append(self, block: bytes) -> None:
        assert self._fd is not None
        while block:
            num_written = os.write(self._fd, block)
            self._num_bytes += num_written
            block = block[num_written:]

    def _read_begin(self) -> float:
        """Return the first time that the file contains, else the time of its last change; now for an empty file."""
        if self._num_bytes == 0:
            return self._now()
        try:
            with self.path.open("rb") as file:
                found = FIRST_TIME.search(file.read(HEAD_BYTES))
            if found is not None:
                return datetime.fromisoformat(found[0].decode()).replace(tzinfo=UTC).timestamp()
            return self.path.stat().st_mtime
        except (OSError, ValueError):
            return self._now()


def _loss_line(num_bytes: int, reason: str, now_s: float) -> bytes:
    """Return the line that says what is missing, after the end of a line that was written in part."""
    timestamp = datetime.fromtimestamp(now_s, UTC).isoformat().replace("+00:00", "Z")
    event = {"event": "output_lost", "bytes": num_bytes, "reason": reason, "level": "warning", "timestamp": timestamp}
    return b"\n" + json.dumps(event).encode() + b"\n"

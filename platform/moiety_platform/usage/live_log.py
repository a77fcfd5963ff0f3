"""Live log: a file with the rows that are otherwise only in memory, so that they survive a killed process.

Lines are written without waiting for the disk, so they survive the process, not the machine. The file is a segment of
the journal: locked while its process lives, and replayed by a later process. The last of several lines of a request
counts, so a running request is written as the row to store if nothing follows. Knows nothing of the database.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import structlog

from moiety_platform.usage.journal import create_segment, to_line, write_all
from moiety_platform.usage.row import UsageRow

COMPACT_BYTES = 1024 * 1024

_log = structlog.get_logger(__name__)


class LiveLog:
    """Live log of one process, created with its first row. Not thread-safe.

    No method raises: if the file cannot be written, rows exist only in memory, which is logged once.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path: Path | None = None
        self._descriptor = -1
        self._size = 0
        self._failing = False

    def add(self, rows: Sequence[UsageRow]) -> None:
        """Write rows to the file."""
        try:
            if self._path is None:
                self._path, self._descriptor = create_segment(self._directory)
                self._size = 0
            lines = b"".join([to_line(row) + b"\n" for row in rows])
            write_all(self._descriptor, lines)
            self._size += len(lines)
        except OSError as error:
            if not self._failing:
                _log.error("usage_live_log_failed", error=str(error), directory=str(self._directory))
            self._failing = True
        else:
            self._failing = False

    def trim(self, live: Sequence[UsageRow]) -> None:
        """Drop all rows but `live`, which are still only in memory.

        This happens at once if `live` is empty, else when the file has grown.
        """
        if self._path is None or self._size == 0 or (live and self._size < COMPACT_BYTES):
            return
        try:
            if live:
                self._rewrite(live)
            else:
                os.ftruncate(self._descriptor, 0)
                self._size = 0
        except OSError as error:  # rows that are left are replayed without effect, since each request counts once
            _log.warning("usage_live_log_untrimmed", error=str(error), directory=str(self._directory))

    def close(self, *, keep: bool) -> None:
        """Remove the file, or with `keep` leave it to the next start."""
        if self._path is None or keep:  # later rows are added to it, and it is locked until the process ends
            return
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._path = None

    def _rewrite(self, rows: Sequence[UsageRow]) -> None:
        """Write the rows to a new file, then remove the old one.

        A kill between the two leaves both, which is harmless.
        """
        assert self._path is not None
        data = b"".join(to_line(row) + b"\n" for row in rows)
        path, descriptor = create_segment(self._directory)
        try:
            write_all(descriptor, data)
            self._path.unlink(missing_ok=True)
        except OSError:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._path, self._descriptor, self._size = path, descriptor, len(data)

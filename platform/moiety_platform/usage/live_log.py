"""What a killed process would otherwise take with it: the rows that are only in its memory, as a file beside them.

Every line is written without waiting for the disk, so it survives the process, not the machine. The file is a segment
of the journal in all but its making: locked while its process lives, and replayed by whoever comes after. Of several
lines of one request the last counts, so a request that is still running is written as the row that it shall be if
nothing follows. Knows nothing of the database.
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
    """The log of one process, made with its first row. No method raises: where the file cannot be written, rows are as
    safe as memory is, which is said once. Not for several threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path: Path | None = None
        self._descriptor = -1
        self._size = 0
        self._failing = False

    def add(self, rows: Sequence[UsageRow]) -> None:
        """Write rows down."""
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
        """Forget all but `live`, the rows that are still in memory only; at once if there are none, and otherwise when
        the file has grown."""
        if self._path is None or self._size == 0 or (live and self._size < COMPACT_BYTES):
            return
        try:
            if live:
                self._rewrite(live)
            else:
                os.ftruncate(self._descriptor, 0)
                self._size = 0
        except OSError as error:  # what is left is replayed in vain, since each request counts once
            _log.warning("usage_live_log_untrimmed", error=str(error), directory=str(self._directory))

    def close(self, *, keep: bool) -> None:
        """Remove the file, or leave it to the next start."""
        if self._path is None or keep:  # rows that still come are added to it, and it is locked until the process ends
            return
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._path = None

    def _rewrite(self, rows: Sequence[UsageRow]) -> None:
        """The rows in a new file, and only then the old one removed; a kill in between leaves both, to no harm."""
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

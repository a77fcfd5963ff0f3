"""Times at which a usage recorder writes rows.

A row after a pause is written soon. While rows keep coming, writes are rarer, because a transaction has the same
statements for one row as for many.
"""

from __future__ import annotations

import time

INTERVAL_S = 0.25
# in intervals: from a write of BUSY_ROWS rows until the next, from one of fewer rows, and the time without a write
# after which a row is written after one interval
BUSY_ROWS, BUSY_INTERVALS, STEADY_INTERVALS, QUIET_INTERVALS = 10, 2, 4, 8


class WritePace:
    """Pauses before the writes of one recorder."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._written_s = float("-inf")
        self._num_rows = 0

    def note_write(self, num_rows: int) -> None:
        """Note the start of a write of so many rows."""
        self._written_s, self._num_rows = time.monotonic(), num_rows

    def pause_s(self) -> float:
        """Return the time from the first row that waits until the next write."""
        if time.monotonic() - self._written_s >= QUIET_INTERVALS * self.interval_s:
            return self.interval_s
        return (BUSY_INTERVALS if self._num_rows >= BUSY_ROWS else STEADY_INTERVALS) * self.interval_s

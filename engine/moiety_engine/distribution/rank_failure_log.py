"""File of rank 0 that records which ranks were lost and when, so that a repeatedly failing rank is recognised.

The first line names the group. Each further line is one loss: seconds since the epoch, and the rank; other lines are
ignored. Lines are only appended, so emptying the file forgets all losses.
"""

from __future__ import annotations

import time
from collections import Counter
from io import SEEK_END
from pathlib import Path
from typing import TextIO

import structlog

from moiety_engine.errors import InvalidConfig

_ROUNDED_S = 0.001
_HEAD = "lost ranks of "
_MAX_BYTES = 1 << 20  # read limit; a valid file has years of losses in that size


class RankFailureLog:
    """Failure log of one rank group. Used by one thread."""

    def __init__(self, file: Path, group: str, *, within_s: float) -> None:
        """Open the log. Losses count for `within_s` seconds.

        `group` describes the ranks in one line. Raises InvalidConfig if the file cannot be written, belongs to another
        group, or is not a failure log.
        """
        self._file, self._head, self._within_s = file, _HEAD + group, within_s
        try:
            with file.open("a+") as lines:
                self._begin(lines)
                lines.seek(0)
                first, *self._lines = lines.read(_MAX_BYTES).splitlines() or [""]
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "it is not a text file"
            raise InvalidConfig(f"--rank-failure-log {file} cannot be used: {reason}; choose another file") from exc
        if first != self._head:
            of = (
                f"has the header {first!r} of another group, while this group is {group}"
                if first.startswith(_HEAD)
                else "is not a rank-failure log"
            )
            raise InvalidConfig(f"--rank-failure-log {file} {of}: choose another file, or empty this one")

    def lost_often(self, times: int) -> dict[int, int]:
        """Return the ranks that were recently lost at least `times` times, with their counts.

        It uses the losses recorded when the file was opened.
        """
        now = time.time() + _ROUNDED_S  # later times come from a clock that was set back since
        counts = Counter(rank for at, rank in map(_read, self._lines) if now - self._within_s <= at <= now)
        return {rank: count for rank, count in sorted(counts.items()) if count >= times}

    def note(self, rank: int) -> None:
        """Record that the rank is lost now."""
        try:
            with self._file.open("a+") as lines:
                self._begin(lines)
                lines.write(f"{time.time():.3f} {rank}\n")
        except OSError as exc:
            structlog.get_logger().warning(
                "rank_failure_log_not_written",
                rank=rank,
                reason=str(exc),
                advice="make the file of --rank-failure-log writable; until then this loss does not count",
            )

    def _begin(self, lines: TextIO) -> None:
        if not lines.seek(0, SEEK_END):
            lines.write(f"{self._head}\n")


def _read(line: str) -> tuple[float, int]:
    at, _, rank = line.partition(" ")
    try:
        return float(at), int(rank)
    except ValueError:
        return 0.0, 0

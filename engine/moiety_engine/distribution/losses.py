"""Which ranks were lost, and when, in a file of rank 0's: so that one that comes back only to be lost again is known.

A line a loss: seconds since the epoch, and the rank. Lines that are nothing of the kind are passed over.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import structlog

from moiety_engine.errors import InvalidConfig

WITHIN_S = 600.0  # losses count for so long
_KEPT = 1000  # lines, of which few are so young


class Losses:
    """Of one group. Losses are noted in one thread."""

    def __init__(self, file: Path) -> None:
        """Raises InvalidConfig for a file that cannot be had."""
        self._file = file
        try:
            file.touch()
            self._lines = file.read_text(errors="replace").splitlines()[-_KEPT:]
        except OSError as exc:
            raise InvalidConfig(f"--rank-losses {file} cannot be written: {exc.strerror}; choose another file") from exc

    def lost_often(self, times: int) -> dict[int, int]:
        """The ranks that were lost so many times of late, or more, and how many."""
        since = time.time() - WITHIN_S
        counts = Counter(rank for at, rank in map(_read, self._lines) if at >= since)
        return {rank: count for rank, count in sorted(counts.items()) if count >= times}

    def note(self, rank: int) -> None:
        """It is lost now."""
        self._lines.append(f"{time.time():.3f} {rank}")
        partial = self._file.with_name(f".{self._file.name}.partial")
        try:
            partial.write_text("\n".join(self._lines) + "\n")
            partial.replace(self._file)
        except OSError as exc:
            structlog.get_logger().warning("rank_loss_not_noted", rank=rank, reason=str(exc))


def _read(line: str) -> tuple[float, int]:
    at, _, rank = line.partition(" ")
    try:
        return float(at), int(rank)
    except ValueError:
        return 0.0, 0

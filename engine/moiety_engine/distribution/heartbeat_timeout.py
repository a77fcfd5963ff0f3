"""Detection of ranks that have been silent for too long. Uses no sockets and no clock."""

from __future__ import annotations

from collections.abc import Iterable


class HeartbeatTimeout:
    """Counts how long other ranks were silent while this process was scheduled.

    If this process wakes later than planned, the machine is overloaded. The silent ranks on it may then be late as
    well, and their messages are not read yet. Therefore an interval counts for at most its planned duration: a rank
    that hangs is noticed after `limit_s` on a machine with free capacity, and a group on an overloaded machine
    survives.
    """

    def __init__(self, ranks: Iterable[int], *, limit_s: float, interval_s: float, now_s: float) -> None:
        """Create the timeout. `interval_s` is the longest duration of an interval if this process wakes in time."""
        self.limit_s, self.interval_s = limit_s, interval_s
        self._begun_s, self._counted_s = now_s, 0.0
        self._last_s = dict.fromkeys(ranks, 0.0)

    def begin_interval(self, now_s: float) -> None:
        """Begin another interval."""
        self._counted_s += min(now_s - self._begun_s, self.interval_s)
        self._begun_s = now_s

    def record(self, rank: int) -> None:
        self._last_s[rank] = self._counted_s

    def forget(self, rank: int) -> None:
        """Do not expect messages of the rank any more."""
        self._last_s.pop(rank, None)

    def too_long(self) -> list[int]:
        """Return the ranks that are silent beyond the limit. Call it after all received messages were processed."""
        return self.longer_than(self.limit_s)

    def longer_than(self, silent_s: float) -> list[int]:
        return [rank for rank, last_s in self._last_s.items() if self._counted_s - last_s > silent_s]

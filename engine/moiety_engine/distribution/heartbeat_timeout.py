"""Who has said nothing for too long. Knows no sockets and no clock."""

from __future__ import annotations

from collections.abc import Iterable


class HeartbeatTimeout:
    """Counts the time for which others were silent while this process got to run.

    Where it wakes later than it asked to, the machine has more to do than it can; then those on it that are silent may
    be as late, and what they have said meanwhile has not been heard. So a turn counts for no more than it was to last:
    a rank that hangs is noticed in `limit_s` where there is room to run, and a group on an overloaded machine lives.
    """

    def __init__(self, ranks: Iterable[int], *, limit_s: float, turn_s: float, now_s: float) -> None:
        """`turn_s`: what a turn lasts at most, if this process wakes in time."""
        self.limit_s, self.turn_s = limit_s, turn_s
        self._turned_s, self._counted_s = now_s, 0.0
        self._heard_s = dict.fromkeys(ranks, 0.0)

    def turn(self, now_s: float) -> None:
        """Another turn has begun."""
        self._counted_s += min(now_s - self._turned_s, self.turn_s)
        self._turned_s = now_s

    def heard(self, rank: int) -> None:
        self._heard_s[rank] = self._counted_s

    def too_long(self) -> list[int]:
        """Those that have been silent beyond the limit. To be asked when all that there is to hear was heard."""
        return self.longer_than(self.limit_s)

    def longer_than(self, silent_s: float) -> list[int]:
        return [rank for rank, heard_s in self._heard_s.items() if self._counted_s - heard_s > silent_s]

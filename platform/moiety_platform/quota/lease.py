"""What one replica may spend of one limit in one window, and what its open requests have reserved of that. Pure.

    settled + held ≤ granted, always

`granted` is what the store has given this replica; it grows by grants and falls by giving back what is free. A hold
takes from several leases at once, all or nothing, may be extended in the same way, and is left exactly once: what was
used is settled, the rest is free again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from moiety_platform.quota.kinds import Meter, Unit


class WindowId(msgspec.Struct, frozen=True, order=True):
    """One limit's window. Ordered, so that all replicas lock several in the same order."""

    quota_id: str
    start: datetime  # aware UTC


@dataclass(slots=True, eq=False)
class Lease:
    """A replica's part of a window. Amounts are of the limit's unit. What is settled of a stock is booked; of a rate it
    is gone; a slot is never spent, only held."""

    window: WindowId
    replica_id: str
    unit: Unit
    granted: int = 0
    settled: int = 0
    held: int = 0
    num_holds: int = 0  # that have it, also such as have reserved nothing of it
    meter: Meter = Meter.STOCK
    good_until_s: float = float("-inf")  # by the replica's monotonic clock

    @property
    def free(self) -> int:
        return self.granted - self.settled - self.held


class Charge(msgspec.Struct, frozen=True):
    """What a request used of one window, on the lease of this replica."""

    window: WindowId
    replica_id: str
    amount: int


_NOTHING: dict[Unit, int] = dict.fromkeys(Unit, 0)


class Hold:
    """What one request has reserved. Made empty; `reserve` more, then `settle` once."""

    __slots__ = ("_has_begun", "_reserved", "is_over", "leases")

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.leases = tuple(leases)
        self._reserved = _NOTHING.copy()
        self._has_begun = False
        self.is_over = False

    def is_good(self, now_s: float) -> bool:
        """By the replica's monotonic clock: whether all that it may reserve of is leased."""
        for lease in self.leases:  # noqa: SIM110 - a generator would cost every request more than the loop
            if now_s >= lease.good_until_s:
                return False
        return True

    def lacking(self, amounts: Mapping[Unit, int]) -> dict[Lease, int]:
        """What each lease lacks for the request to have reserved so much in all; empty if nothing does."""
        short = {}
        for lease in self.leases:
            more = amounts.get(lease.unit, 0) - self._reserved[lease.unit]
            if more > 0 and more > lease.free:
                short[lease] = more - lease.free
        return short

    def reserve(self, amounts: Mapping[Unit, int]) -> bool:
        """Have so much reserved in all, of every lease; less than before changes nothing. False, and nothing is taken,
        where a lease has not that much free."""
        assert not self.is_over, "a hold that was settled takes no more"
        reserved = self._reserved
        more = dict.fromkeys(reserved, 0)
        for unit, wanted in amounts.items():
            more[unit] = max(0, wanted - reserved[unit])
        for lease in self.leases:
            if 0 < more[lease.unit] > lease.granted - lease.settled - lease.held:
                return False
        num_holds, self._has_begun = not self._has_begun, True
        for lease in self.leases:
            lease.held += more[lease.unit]
            lease.num_holds += num_holds
        for unit, add in more.items():
            reserved[unit] += add
        return True

    def drop(self, window: WindowId) -> None:
        """The limit was taken away: nothing is reserved under it any more, and nothing charged."""
        for lease in self.leases:
            if lease.window == window:
                lease.held -= self._reserved[lease.unit]
                lease.num_holds -= self._has_begun
        self.leases = tuple(lease for lease in self.leases if lease.window != window)

    def charges(self, used: Mapping[Unit, int]) -> tuple[Charge, ...]:
        """How that would be charged: to stocks, since rates refill and slots come back by themselves."""
        charges = [
            Charge(lease.window, lease.replica_id, amount)
            for lease in self.leases
            if lease.meter is Meter.STOCK and (amount := used.get(lease.unit, 0)) > 0
        ]
        return tuple(charges)

    def settle(self, used: Mapping[Unit, int]) -> tuple[Charge, ...]:
        """The end: what was used is spent, the rest free again. Raises ValueError for more than was reserved, and for a
        second end."""
        if self.is_over:
            raise ValueError("this hold was settled already")
        reserved = self._reserved
        for lease in self.leases:
            if used.get(lease.unit, 0) > reserved[lease.unit]:
                raise ValueError(f"used {used}, reserved {reserved}: spending runs ahead of the hold")
        self.is_over = True
        for lease in self.leases:
            lease.held -= reserved[lease.unit]
            lease.num_holds -= self._has_begun
            if lease.meter is not Meter.SLOTS:
                lease.settled += used.get(lease.unit, 0)
        return self.charges(used)

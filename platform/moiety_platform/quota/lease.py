"""Lease of one replica on one limit in one window, and the holds of its open requests. Pure.

    settled + held ≤ granted, always

`granted` is what the store has given this replica; it grows by grants and falls when free parts are given back. A hold
takes from several leases at once, all or nothing, may be extended in the same way, and ends exactly once: the used
amount is settled, the rest is free again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from moiety_platform.quota.kinds import Meter, Unit


class WindowId(msgspec.Struct, frozen=True, order=True):
    """Window of one limit. Ordered, so that all replicas lock several windows in the same order."""

    quota_id: str
    start: datetime  # aware UTC


@dataclass(slots=True, eq=False)
class Lease:
    """A replica's part of a window, in the limit's unit.

    The settled part of a stock is booked; of a rate it is gone; a slot is never settled, only held.
    """

    window: WindowId
    replica_id: str
    unit: Unit
    granted: int = 0
    settled: int = 0
    held: int = 0
    num_holds: int = 0  # holds on this lease, including those that have reserved nothing
    meter: Meter = Meter.STOCK
    good_until_s: float = float("-inf")  # by the replica's monotonic clock

    @property
    def free(self) -> int:
        return self.granted - self.settled - self.held


class Charge(msgspec.Struct, frozen=True):
    """Amount that a request used of one window, on the lease of this replica."""

    window: WindowId
    replica_id: str
    amount: int


_NO_UNITS: dict[Unit, int] = dict.fromkeys(Unit, 0)


class Hold:
    """Reservation of one request. It starts empty; call `reserve` for more, then `settle` once."""

    __slots__ = ("_has_begun", "_reserved", "is_over", "leases", "stocks")

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.leases = tuple(leases)
        self.stocks = tuple([lease for lease in self.leases if lease.meter is Meter.STOCK]) if leases else ()
        self._reserved = _NO_UNITS.copy()
        self._has_begun = False
        self.is_over = False

    def is_good(self, now_s: float) -> bool:
        """Return whether all leases of the hold are valid at `now_s` of the replica's monotonic clock."""
        for lease in self.leases:  # noqa: SIM110 - a generator would cost every request more than the loop
            if now_s >= lease.good_until_s:
                return False
        return True

    def lacking(self, amounts: Mapping[Unit, int]) -> dict[Lease, int]:
        """Return what each lease lacks to reserve the amounts in total; empty if none lacks anything."""
        short = {}
        for lease in self.leases:
            more = amounts.get(lease.unit, 0) - self._reserved[lease.unit]
            if more > 0 and more > lease.free:
                short[lease] = more - lease.free
        return short

    def reserve(self, amounts: Mapping[Unit, int]) -> bool:
        """Raise the reservation of every lease to the amounts in total; smaller amounts change nothing.

        Returns False, and takes nothing, if a lease does not have enough free.
        """
        assert not self.is_over, "a hold that was settled takes no more"
        reserved = self._reserved
        if self.leases and not self._take(
            {unit: wanted - reserved[unit] for unit, wanted in amounts.items() if wanted > reserved[unit]}
        ):
            return False
        for unit, wanted in amounts.items():
            reserved[unit] = max(reserved[unit], wanted)
        return True

    def _take(self, more: Mapping[Unit, int]) -> bool:
        """Hold more of every lease; return False, and take nothing, if a lease does not have enough free."""
        raised = [(lease, more[lease.unit]) for lease in self.leases if lease.unit in more]
        for lease, add in raised:
            if add > lease.granted - lease.settled - lease.held:
                return False
        for lease, add in raised:
            lease.held += add
        if not self._has_begun:
            self._has_begun = True
            for lease in self.leases:
                lease.num_holds += 1
        return True

    def drop(self, window: WindowId) -> None:
        """Drop a window whose limit was deleted: nothing is reserved or charged under it any more."""
        for lease in self.leases:
            if lease.window == window:
                lease.held -= self._reserved[lease.unit]
                lease.num_holds -= self._has_begun
        self.leases = tuple(lease for lease in self.leases if lease.window != window)
        self.stocks = tuple(lease for lease in self.stocks if lease.window != window)

    def charges(self, used: Mapping[Unit, int]) -> tuple[Charge, ...]:
        """Return the charges for `used`: to stocks only, since rates refill and slots are freed at the end."""
        if not self.stocks:
            return ()
        charges = [
            Charge(lease.window, lease.replica_id, amount)
            for lease in self.stocks
            if (amount := used.get(lease.unit, 0)) > 0
        ]
        return tuple(charges)

    def settle(self, used: Mapping[Unit, int]) -> tuple[Charge, ...]:
        """End the hold: settle what was used, and free the rest.

        Raises ValueError for more than was reserved, and for a second call.
        """
        if self.is_over:
            raise ValueError("this hold was settled already")
        reserved = self._reserved
        for unit, amount in used.items():
            if amount > reserved[unit]:
                raise ValueError(f"used {used} of {reserved} reserved: usage exceeds the hold")
        self.is_over = True
        has_begun, slots = self._has_begun, Unit.SLOTS
        for lease in self.leases:
            unit = lease.unit
            lease.held -= reserved[unit]
            lease.num_holds -= has_begun
            if unit is not slots and unit in used:
                lease.settled += used[unit]
        return self.charges(used)

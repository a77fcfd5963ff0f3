"""Virtual counter of one tenant, as policies with virtual token counters keep it."""

from __future__ import annotations


class ServiceCounter:
    """Counter of a tenant's service, divided by its weight, and the part of it that is service of this replica."""

    __slots__ = ("counter", "not_served", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.counter = 0.0
        self.not_served = 0.0  # part of the counter that is no service of this replica: lifts, and service elsewhere

    @property
    def own_service(self) -> float:
        """Service of this replica, charges in advance included, divided by the weight."""
        return self.counter - self.not_served

    def raise_counter(self, counter: float) -> None:
        """Raise the counter to this value for another reason than service of this replica."""
        if counter > self.counter:
            self.not_served += counter - self.counter
            self.counter = counter

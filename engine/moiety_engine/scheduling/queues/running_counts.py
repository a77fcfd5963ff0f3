"""Numbers of running sequences by rank and tenant, counted as sequences join and leave the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from moiety_engine.sequence import Sequence


class RunningCounts:
    """Counts of one scheduler's batch. The queues update them; policies read them."""

    def __init__(self) -> None:
        self.worst_rank = -1  # of the running sequences; -1 if none runs
        self._of_rank: Counter[int] = Counter()  # without ranks that have none
        self._by_tenant: dict[int, dict[str, int]] = {}  # by rank
        self._several: dict[int, dict[str, int]] = {}  # the same of tenants with at least two

    def of_rank(self, rank: int) -> tuple[int, Mapping[str, int], Mapping[str, int]]:
        """Return the number of running sequences of this rank, by tenant, and by tenant with at least two.

        The numbers by tenant change with the batch, and have no tenant without any.
        """
        return self._of_rank[rank], self._by_tenant.get(rank, {}), self._several.get(rank, {})

    def add(self, sequence: Sequence) -> None:
        """Count a sequence that joins the batch."""
        rank, tenant = sequence.service.rank, sequence.request.tenant
        self._of_rank[rank] += 1
        self.worst_rank = max(self.worst_rank, rank)
        of_rank = self._by_tenant.setdefault(rank, {})
        count = of_rank[tenant] = of_rank.get(tenant, 0) + 1
        if count > 1:
            self._several.setdefault(rank, {})[tenant] = count

    def remove(self, sequence: Sequence) -> None:
        """Count a sequence that leaves the batch no more."""
        rank, tenant = sequence.service.rank, sequence.request.tenant
        self._of_rank[rank] -= 1
        if not self._of_rank[rank]:
            del self._of_rank[rank]
            self.worst_rank = max(self._of_rank, default=-1)
        of_rank = self._by_tenant[rank]
        count = of_rank[tenant] = of_rank[tenant] - 1
        if not count:
            del of_rank[tenant]
        elif count == 1:
            del self._several[rank][tenant]
        else:
            self._several[rank][tenant] = count

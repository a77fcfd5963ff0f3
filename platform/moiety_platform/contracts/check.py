"""The check of a contract: which replicas and which class carry the new tenant without breaking anybody's SLO.

It simulates the recent traffic without the tenant and with it. If a class misses its SLO with the tenant, further
runs find the smallest number of replicas that carries it, and the lower classes that need no further replica. If none
misses it, two further runs have more traffic than was seen, and show what remains of the SLOs in a larger burst.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum

import msgspec

from moiety_platform.contracts.arrivals import CONTRACT, Arrival, ContractTerms
from moiety_platform.contracts.errors import ContractProblem
from moiety_wire.classes import ServiceClass

TOLERANCE = 0.005  # of attainment, by which two runs of a class may differ without a reason
Attainments = Mapping[str, float]
Simulate = Callable[[Sequence[Arrival], Mapping[str, ServiceClass], int], Awaitable[Attainments]]
"""Returns the SLO attainment of each class with requests: (arrivals, classes, replicas) → share by class name."""


class Verdict(StrEnum):
    """Result of a check."""

    ACCEPTED = "accepted"  # the replicas carry the tenant as it is
    NEEDS_MORE = "needs_more"  # with more replicas, or in a lower class
    REFUSED = "refused"  # neither helps


class ContractRun(msgspec.Struct, frozen=True):
    """One simulated run. `attainment` is that of each class, `tenant_attainment` that of the new tenant's requests.

    `missed` are the classes whose SLO the run breaks, and `contract` for the new tenant itself.
    """

    service_class: str
    replicas: int
    attainment: dict[str, float]
    tenant_attainment: float
    missed: list[str]


class ContractReport(msgspec.Struct, frozen=True):
    """Result of a check. `replicas_needed` is in the tenant's class, `classes` are lower ones that need no replica.

    `burst` is the run with the tenant and a burst of the other traffic, for an accepted one; `missed` there are the
    SLOs that hold on the whole, and are broken in a burst.
    """

    verdict: Verdict
    replicas: int
    replicas_needed: int | None
    classes: list[str]
    before: dict[str, float]
    runs: list[ContractRun]
    burst: ContractRun | None = None


class ContractCheck:
    """Check of one contract. Runs are kept, in their order."""

    def __init__(
        self,
        terms: ContractTerms,
        recent: Sequence[Arrival],
        own: Sequence[Arrival],
        classes: Mapping[str, ServiceClass],
        simulate: Simulate,
        *,
        required: float,
        make_burst: Callable[[], Sequence[Arrival]] = list,
    ) -> None:
        """Raise ContractProblem for an unknown class. `required` is the attainment to reach, such as 0.99.

        `make_burst` returns the recent traffic with a burst (`burst_of`), which is simulated if there is one. It is
        called in a thread, since it takes seconds for much traffic, and only for an accepted tenant.
        """
        if terms.service_class not in classes:
            raise ContractProblem(f"there is no class {terms.service_class!r}; there are: {', '.join(classes)}")
        if CONTRACT in classes:
            raise ContractProblem(f"the name {CONTRACT!r} is reserved in the simulation; rename that class")
        self._terms, self._classes, self._simulate, self._required = terms, classes, simulate, required
        self._recent, self._own, self._make_burst = list(recent), list(own), make_burst
        self._before: Attainments = {}
        self.runs: list[ContractRun] = []

    async def run(self, replicas: int, max_replicas: int) -> ContractReport:
        """Return the report; `replicas` are there, and up to `max_replicas` are tried."""
        self._before = await self._simulate(self._recent, self._classes, replicas) if self._recent else {}
        wanted = self._terms.service_class
        needed: int | None = replicas
        lower: list[str] = []
        if not await self._carries(wanted, replicas):
            needed = await self._replicas_needed(replicas, max_replicas)
            rank = self._classes[wanted].rank
            for name, service in sorted(self._classes.items(), key=lambda one: one[1].rank):
                if service.rank > rank and await self._carries(name, replicas):
                    lower.append(name)
        verdict = Verdict.ACCEPTED if needed == replicas else Verdict.NEEDS_MORE if needed or lower else Verdict.REFUSED
        in_burst = await self._in_burst(replicas) if verdict is Verdict.ACCEPTED else None
        return ContractReport(verdict, replicas, needed, lower, dict(self._before), self.runs, in_burst)

    async def _in_burst(self, replicas: int) -> ContractRun | None:
        """Return the run with the tenant in a burst of the other traffic, compared with that burst alone."""
        burst = await asyncio.to_thread(self._make_burst)
        if not burst:
            return None
        before = await self._simulate(burst, self._classes, replicas)
        return await self._run_with_tenant(burst, before, self._terms.service_class, replicas)

    async def _replicas_needed(self, low: int, most: int) -> int | None:
        """Return the smallest number of replicas above `low` that carries the tenant: doubled, then bisected."""
        high = low
        while high < most:
            high = min(most, 2 * high)
            if await self._carries(self._terms.service_class, high):
                break
            low = high
        else:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if await self._carries(self._terms.service_class, middle):
                high = middle
            else:
                low = middle
        return high

    async def _carries(self, service_class: str, replicas: int) -> bool:
        """Return whether the replicas carry the tenant in this class, and keep the run."""
        run = await self._run_with_tenant(self._recent, self._before, service_class, replicas)
        self.runs.append(run)
        return not run.missed

    async def _run_with_tenant(
        self, others: Sequence[Arrival], before: Attainments, service_class: str, replicas: int
    ) -> ContractRun:
        """Return the run of the tenant in this class beside other traffic, which attained `before` alone.

        The tenant's requests must reach the required attainment, and every other class either that or what it attained
        before.
        """
        own = msgspec.structs.replace(self._classes[service_class], name=CONTRACT)
        found = await self._simulate([*others, *self._own], {**self._classes, CONTRACT: own}, replicas)
        missed = [
            name
            for name, attainment in found.items()
            if attainment < min(self._required, before.get(name, self._required)) - TOLERANCE
        ]
        if found[CONTRACT] < self._required and CONTRACT not in missed:
            missed.append(CONTRACT)
        attained = {name: attainment for name, attainment in found.items() if name != CONTRACT}
        return ContractRun(service_class, replicas, attained, found[CONTRACT], missed)

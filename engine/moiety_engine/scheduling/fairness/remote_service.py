"""Service that the tenants of one replica receive on the other replicas of its model, as reports say.

Merging is idempotent: the largest sum of an account counts, in whatever order and however often reports arrive. Of a
replica that was unknown so far, only the service after its first report counts, so a new replica starts like the
virtual token counter of a new server and holds nothing against tenants that were served before.

All replicas on which a tenant is served learn of the same difference at the same time. If each of them corrected all of
it, the fleet would overshoot by the number of replicas, and serve tenants in turns of one exchange period. So each one
adds, in every period, the m-th part of the service that it has not added yet, where m is the number of replicas that
serve the tenant: together they correct the difference once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from moiety_wire.fleet_service import ReplicaService, TenantService

REPLICA_FORGOTTEN_S = 60.0  # a replica that no gateway reported for so long counts as new when it returns
MAX_ACCOUNTS = 4096  # of each other replica, whose last sums are remembered
MAX_PENDING = 16384  # tenants with service to be added; beyond it, those with the least are dropped
_RECENT_PERIODS = 8  # a replica serves a tenant if its sum grew in that time
_LEAST_SERVICE = 1.0  # a smaller rest is added at once


@dataclass(slots=True)
class _OtherReplica:
    counted_from: int  # an account that is not in `sums`, with a larger id, counts from 0
    heard_s: float
    sums: dict[int, float] = field(default_factory=dict)  # by account id, least recently grown first


@dataclass(slots=True)
class _PendingService:
    amount: float = 0.0  # not added to the tenant's counter yet
    grew_s: dict[str, float] = field(default_factory=dict)  # by engine id, when the tenant's sum last grew


@dataclass(frozen=True, slots=True)
class ServiceAddition:
    """Service to be added to the counter of a tenant, in the unit of the policy's counters."""

    rank: int
    tenant: str
    service: float


class RemoteService:
    """Reports of the other replicas. Owned by the exchange; single-threaded. `period_s` is the exchange period."""

    def __init__(self, policy: str, period_s: float) -> None:
        self._policy = policy
        self._period_s = period_s
        self._replicas: dict[str, _OtherReplica] = {}
        self._pending: dict[tuple[int, str], _PendingService] = {}
        self._added_s: float | None = None  # time of the last addition
        self.received_total = 0.0  # service of all reports that counted

    @property
    def num_replicas(self) -> int:
        """Number of other replicas that reports came of lately."""
        return len(self._replicas)

    def merge(self, reports: Iterable[ReplicaService], now_s: float) -> None:
        """Take reports of other replicas. `now_s` is a time of this process."""
        for one in reports:
            if one.report.policy == self._policy:
                self._merge_report(one, now_s)
        silent = [name for name, other in self._replicas.items() if now_s - other.heard_s > REPLICA_FORGOTTEN_S]
        for name in silent:
            del self._replicas[name]

    def _merge_report(self, one: ReplicaService, now_s: float) -> None:
        other = self._replicas.get(one.engine_id)
        if other is None:
            other = self._replicas[one.engine_id] = _OtherReplica(one.report.newest_account_id, now_s)
        other.heard_s = now_s
        for tenant in one.report.tenants:
            if math.isfinite(tenant.service) and tenant.service >= 0:
                grown = _count(other, tenant)
                if grown > 0:
                    pending = self._pending.setdefault((tenant.rank, tenant.tenant_id), _PendingService())
                    pending.amount += grown
                    pending.grew_s[one.engine_id] = now_s
                    self.received_total += grown
        while len(other.sums) > MAX_ACCOUNTS:
            account_id = next(iter(other.sums))
            del other.sums[account_id]
            other.counted_from = max(other.counted_from, account_id)  # so that a late report of it counts nothing

    def take_additions(self, now_s: float) -> list[ServiceAddition]:
        """Return the service to add now. Each call covers the time since the last one, up to one period."""
        since_s = self._period_s if self._added_s is None else now_s - self._added_s
        if since_s <= 0:
            if since_s < 0:  # the clock was set back
                self._added_s = now_s
            return []
        self._added_s = now_s
        part = min(1.0, since_s / self._period_s)
        recent_s = now_s - _RECENT_PERIODS * self._period_s
        additions, left = [], {}
        for (rank, tenant), pending in self._pending.items():
            pending.grew_s = {name: at_s for name, at_s in pending.grew_s.items() if recent_s <= at_s <= now_s}
            service = pending.amount * part / (1 + len(pending.grew_s))
            if pending.amount <= _LEAST_SERVICE:
                service = pending.amount
            pending.amount -= service
            if service > 0:
                additions.append(ServiceAddition(rank, tenant, service))
            if pending.amount > 0 or pending.grew_s:
                left[rank, tenant] = pending
        if len(left) > MAX_PENDING:
            kept = sorted(left, key=lambda key: left[key].amount, reverse=True)[:MAX_PENDING]
            left = {key: left[key] for key in kept}
        self._pending = left
        return additions


def _count(other: _OtherReplica, tenant: TenantService) -> float:
    """Record an account's sum, and return by how much it grew beyond what was counted."""
    known = other.sums.pop(tenant.account_id, None)
    if known is None:
        known = tenant.service if tenant.account_id <= other.counted_from else 0.0
    other.sums[tenant.account_id] = max(known, tenant.service)
    return max(0.0, tenant.service - known)

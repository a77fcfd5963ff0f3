"""Service that the tenants of one replica receive, as it is reported to the other replicas.

A tenant's service is read from its counter when a report is made, so that counting costs nothing per token. It knows
neither the messages' way nor the other replicas.
"""

from __future__ import annotations

from heapq import nlargest
from typing import Protocol

from moiety_wire.fleet_service import MAX_REPORTED_TENANTS, ServiceReport, TenantService

REPORTED_FOR_S = 10.0  # how long the last service of an idle tenant is reported


class CountedTenant(Protocol):
    """State of one tenant in a policy."""

    active: int  # requests that have not ended

    @property
    def own_service(self) -> float:
        """Service on this replica since the state was created, in the unit of the policy's counters."""
        ...


class _ServiceRecord:
    __slots__ = ("account_id", "base", "changed_s", "last", "rank", "reported", "tenant")

    def __init__(self, account_id: int, rank: int, tenant: str, base: float) -> None:
        self.account_id = account_id
        self.rank = rank
        self.tenant = tenant
        self.base = base  # the counter's service when the record began
        self.last = self.reported = 0.0
        self.changed_s: float | None = None  # when a report last found more service


class ServedTenants:
    """Records of the tenants that were served recently. Owned by the policy's exchange; single-threaded."""

    def __init__(self) -> None:
        self._records: dict[CountedTenant, _ServiceRecord] = {}
        self._newest_id = 0

    def track(self, account: CountedTenant, rank: int, tenant: str) -> None:
        """Report the service of this account from now on. Called before a request of it is charged."""
        if account not in self._records:
            self._newest_id += 1
            self._records[account] = _ServiceRecord(self._newest_id, rank, tenant, account.own_service)

    def report(self, policy: str, now_s: float, max_tenants: int = MAX_REPORTED_TENANTS) -> ServiceReport:
        """Return the tenants served within the last seconds: at most `max_tenants`, most unreported service first.

        `now_s` is a time of this process. Service beyond the limit is reported later, since the sums are cumulative.
        """
        for account, record in list(self._records.items()):
            service = account.own_service - record.base
            if service > record.last or record.changed_s is None:
                record.last, record.changed_s = max(service, record.last), now_s
            elif account.active == 0 and now_s - record.changed_s > REPORTED_FOR_S and record.reported == record.last:
                del self._records[account]
        chosen = nlargest(max_tenants, self._records.values(), key=_reporting_order)
        for record in chosen:
            record.reported = record.last
        tenants = [TenantService(one.account_id, one.rank, one.tenant, one.last) for one in chosen]
        return ServiceReport(policy, self._newest_id, tenants)


def _reporting_order(record: _ServiceRecord) -> tuple[float, float]:
    return record.last - record.reported, record.changed_s or 0.0

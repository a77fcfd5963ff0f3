"""Exchange of tenants' service between the replicas of a model: reports of this one, additions from the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moiety_engine.scheduling.fairness.remote_service import RemoteService
from moiety_engine.scheduling.fairness.served_tenants import ServedTenants
from moiety_wire.fleet_service import ReplicaService, ServiceReport
from moiety_wire.messages import HEARTBEAT_INTERVAL_S

if TYPE_CHECKING:
    from moiety_engine.scheduling.policies.policy_interface import Policy

EXCHANGE_PERIOD_S = 2 * HEARTBEAT_INTERVAL_S  # a report waits for a heartbeat of the engine and one of a gateway
_PEAK_KEPT = 0.9  # of the largest service of an exchange, from one exchange to the next


class ServiceExchange:
    """One replica's part of the exchange. Single-threaded; between steps."""

    def __init__(self, policy: Policy, policy_name: str, *, period_s: float = EXCHANGE_PERIOD_S) -> None:
        """Begin to count. The policy must have counters (`counts_tenant_service`)."""
        assert policy.counts_tenant_service, f"policy {policy_name} has no counters to exchange"
        self._policy = policy
        self._policy_name = policy_name
        self._remote = RemoteService(policy_name, period_s)
        self._served = policy.served_tenants = ServedTenants()
        self._peak = 0.0
        self._report_interval_s = period_s / 2
        self._reported_s = -math.inf

    def take_report(self, now_s: float) -> ServiceReport | None:
        """Return the service of tenants on this replica; None if the last report is recent.

        `now_s` is the wall clock, which may be set back.
        """
        if 0 <= now_s - self._reported_s < self._report_interval_s:
            return None
        self._reported_s = now_s
        return self._served.report(self._policy_name, now_s)

    def receive(self, replicas: Iterable[ReplicaService], now_s: float) -> None:
        """Add the service on other replicas to the counters. The caller leaves out this replica's own reports."""
        self._remote.merge(replicas, now_s)
        additions = self._remote.take_additions(now_s)
        total = sum(one.service for one in additions)
        self._peak = max(total, _PEAK_KEPT * self._peak)
        for one in additions:
            self._policy.add_remote_service(one.rank, one.tenant, one.service, 2 * self._peak)

    @property
    def num_replicas(self) -> int:
        """Number of other replicas that reports came of lately."""
        return self._remote.num_replicas

    @property
    def received_total(self) -> float:
        """Service that tenants received on other replicas since this one knows them."""
        return self._remote.received_total

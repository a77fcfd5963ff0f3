"""Replicas of one model that are simulated together, with or without the exchange of tenants' service.

Each replica is the real scheduler under virtual time. A report reaches the other replicas half an exchange period after
it was made, as between a heartbeat of an engine and one of a gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from moiety_engine.scheduling.fairness.service_exchange import ServiceExchange
from moiety_engine.simulator.pool import PoolDevice, PoolTerms
from moiety_wire.fleet_service import ReplicaService, ServiceReport
from moiety_workload.request import TraceRequest, Workload

_BACKLOG = 64  # waiting requests of a tenant on each of its replicas
_TOP_UP_S = 0.5  # time after which the backlog is filled up


@dataclass(frozen=True, slots=True)
class FleetTenant:
    """A tenant that is backlogged on some replicas for the whole simulation: always the same requests."""

    name: str
    replicas: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    service_class: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TenantServiceSamples:
    """Service of each tenant over all replicas, in tokens of VTC divided by weight, at regular times."""

    interval_s: float
    service: Sequence[Mapping[str, float]]  # by tenant; the first one is at the start of the measured time

    def shares(self) -> dict[str, float]:
        """Return each tenant's part of the service within the measured time."""
        grown = {name: self.service[-1][name] - self.service[0][name] for name in self.service[0]}
        total = sum(grown.values())
        return {name: service / total for name, service in grown.items()}

    def largest_difference(self) -> float:
        """Return the largest range, over all pairs of tenants, of the difference of their service, in tokens."""
        names = list(self.service[0])
        worst = 0.0
        for index, first in enumerate(names):
            for second in names[index + 1 :]:
                differences = [at[first] - at[second] for at in self.service]
                worst = max(worst, max(differences) - min(differences))
        return worst

    def total(self) -> float:
        """Return the service of all tenants within the measured time."""
        return sum(self.service[-1].values()) - sum(self.service[0].values())


class _FleetReplica(PoolDevice):
    """One replica, with its part of the exchange."""

    _exchange: ServiceExchange | None = None

    def exchange_service(self, policy: str, period_s: float) -> None:
        self._exchange = ServiceExchange(self._scheduler.policy, policy, period_s=period_s)

    def take_report(self, now_s: float) -> ServiceReport | None:
        return None if self._exchange is None else self._exchange.take_report(now_s)

    def receive(self, replicas: Iterable[ReplicaService], now_s: float) -> None:
        if self._exchange is not None:
            self._exchange.receive(replicas, now_s)

    def keep_backlogged(self, tenants: Iterable[FleetTenant], now_s: float) -> None:
        """Submit requests of tenants that have few left to start."""
        for tenant in tenants:
            account = self._accounts.get((tenant.name, tenant.service_class))
            num_waiting = 0 if account is None else account.num_waiting
            if num_waiting < _BACKLOG // 2:
                request = TraceRequest(
                    now_s, tenant.name, tenant.input_tokens, tenant.output_tokens, tenant.service_class
                )
                for _ in range(_BACKLOG - num_waiting):
                    self.submit(request)

    def service(self) -> dict[str, float]:
        """Return the service of each tenant so far, in tokens of VTC divided by weight."""
        return {one.tenant.name: one.service / one.tenant.weight for one in self._account_list}


class Fleet:
    """Replicas that serve backlogged tenants. `period_s`: exchange period; None: no exchange."""

    def __init__(
        self, num_replicas: int, terms: PoolTerms, tenants: Iterable[FleetTenant], period_s: float | None
    ) -> None:
        self._tenants = list(tenants)
        self._period_s = period_s
        weights = {tenant.name: tenant.weight for tenant in self._tenants}
        workload = Workload("fleet", (), 1.0, weights=weights)
        longest = max(tenant.output_tokens for tenant in self._tenants)
        self._replicas = [_FleetReplica(workload, terms, longest, 0.0) for _ in range(num_replicas)]
        for index, replica in enumerate(self._replicas):
            replica.keep_backlogged((one for one in self._tenants if index in one.replicas), 0.0)
        if period_s is not None:
            for replica in self._replicas:
                replica.exchange_service(terms.policy, period_s)
        self._in_transit: list[ReplicaService] = []
        self._ticks = count(1)

    def run(self, until_s: float, *, warm_up_s: float, num_samples: int = 200) -> TenantServiceSamples:
        """Simulate, and return the service from `warm_up_s` to `until_s`. Both are seconds of virtual time."""
        interval_s = (until_s - warm_up_s) / num_samples
        samples: list[dict[str, float]] = []
        half_s = None if self._period_s is None else self._period_s / 2
        next_tick, now_s = next(self._ticks), 0.0
        while True:
            sample_s = warm_up_s + len(samples) * interval_s
            now_s = min(sample_s, now_s + _TOP_UP_S)
            if half_s is not None:
                now_s = min(now_s, next_tick * half_s)
            for index, replica in enumerate(self._replicas):
                replica.advance(now_s)
                replica.keep_backlogged((one for one in self._tenants if index in one.replicas), now_s)
            if half_s is not None and now_s >= next_tick * half_s:
                self._exchange(next_tick, now_s)
                next_tick = next(self._ticks)
            if now_s >= sample_s:
                samples.append(self._service())
                if len(samples) > num_samples:
                    return TenantServiceSamples(interval_s, samples)

    def _exchange(self, tick: int, now_s: float) -> None:
        """Take the reports at odd ticks, and deliver them at even ones."""
        if tick % 2:
            reports = ((name, replica.take_report(now_s)) for name, replica in self._named())
            self._in_transit = [ReplicaService(name, report) for name, report in reports if report is not None]
            return
        for name, replica in self._named():
            replica.receive([one for one in self._in_transit if one.engine_id != name], now_s)

    def _named(self) -> Iterable[tuple[str, _FleetReplica]]:
        return ((f"replica-{index}", replica) for index, replica in enumerate(self._replicas))

    def _service(self) -> dict[str, float]:
        found = {tenant.name: 0.0 for tenant in self._tenants}
        for replica in self._replicas:
            for name, service in replica.service().items():
                found[name] += service
        return found

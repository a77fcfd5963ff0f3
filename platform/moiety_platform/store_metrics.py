"""Prometheus metrics of one gateway's use of its store: pending rows of the ledger, leases and quarantine.

Read from memory at each scrape, so a store that is down or slow does not delay a scrape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moiety_platform.clock import Clock
from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.inference.request_recorder import RequestRecorder
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.usage.metering import MeterReader
from moiety_platform.usage.recorder import UsageRecorder


@dataclass(frozen=True, eq=False)
class StoreCollector(Collector):
    """Collector of one gateway."""

    clock: Clock
    store: StoreReadiness
    usage: UsageRecorder
    quotas: QuotaEnforcer
    meter: MeterReader
    requests: RequestRecorder

    def collect(self) -> Iterator[Metric]:
        ready = "1 if the database has the schema that this version needs; 0 if a migration is pending."
        yield GaugeMetricFamily("moiety_store_ready", ready, self.store.poll())
        yield GaugeMetricFamily("moiety_open_requests", "Open requests of this gateway.", self.requests.num_open)
        yield from self._ledger()
        yield from self._leases()

    def _ledger(self) -> Iterator[Metric]:
        stats = self.usage.stats()
        lag_s = 0.0 if stats.oldest is None else (self.clock.now() - stats.oldest).total_seconds()
        yield GaugeMetricFamily(
            "moiety_ledger_lag_seconds",
            "Age of the oldest usage row that is not yet in the database; 0 if there is none.",
            max(0.0, lag_s),
        )
        yield GaugeMetricFamily("moiety_ledger_pending_rows", "Usage rows buffered in memory.", stats.pending)
        yield GaugeMetricFamily(
            "moiety_ledger_journal_waiting",
            "1 while the journal on disk holds usage rows that the database does not have.",
            stats.journal_waiting,
        )
        rows = CounterMetricFamily(
            "moiety_ledger_rows",
            "Usage rows by step: recorded, stored, journaled or refused by the database.",
            labels=["step"],
        )
        for step in ("recorded", "stored", "journaled", "refused"):
            rows.add_metric([step], getattr(stats, step))
        yield rows
        yield CounterMetricFamily(
            "moiety_ledger_charged_late",
            "Requests of crashed gateways, charged by the engines' counts.",
            self.meter.num_charged,
        )

    def _leases(self) -> Iterator[Metric]:
        stats = self.quotas.stats()
        yield GaugeMetricFamily("moiety_quota_leases", "Quota leases that this gateway holds.", stats.leases)
        yield GaugeMetricFamily("moiety_quota_waiting_requests", "Requests that wait for a quota lease.", stats.waiting)
        age = GaugeMetricFamily(
            "moiety_quota_store_age_seconds",
            "Seconds since the store last answered about leases, which expire after 15 s; absent without leases.",
        )
        if stats.age_s is not None:
            age.add_metric([], stats.age_s)
        replicas = GaugeMetricFamily("moiety_quota_quarantined_replicas", "Crashed gateways with leases in quarantine.")
        leases = GaugeMetricFamily(
            "moiety_quota_quarantined_leases",
            "Leases in quarantine, which count as spent until the engines report otherwise.",
        )
        oldest = GaugeMetricFamily(
            "moiety_quota_quarantine_oldest_seconds",
            "Seconds since the last heartbeat of the crashed gateway that is silent longest.",
        )
        found = self.quotas.quarantine.stats()
        if found is not None:
            replicas.add_metric([], found.replicas)
            leases.add_metric([], found.leases)
            oldest.add_metric([], found.oldest_s)
        yield from (age, replicas, leases, oldest)

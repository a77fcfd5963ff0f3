"""Prometheus metrics of the endpoint picker, listed in docs/metrics.md, and the HTTP server that exports them.

Labels are bounded: they name no gateway and no client.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moiety_platform.endpoint_picker.members import PoolMember, PoolMembers
from moiety_platform.endpoint_picker.picking import PickOutcome
from moiety_platform.listening import AddressUnavailable
from moiety_platform.metrics import new_registry

PICK_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)


class ProbeOutcome(StrEnum):
    """Result of one probe of a gateway."""

    READY = "ready"
    NOT_READY = "not_ready"  # answered with another status than 200
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"


class MemberState(StrEnum):
    """State of a gateway of the pool, as the probes have found it."""

    READY = "ready"
    NOT_READY = "not_ready"
    NOT_PROBED = "not_probed"

    @classmethod
    def of(cls, member: PoolMember) -> MemberState:
        if not member.is_probed:
            return cls.NOT_PROBED
        return cls.READY if member.is_ready else cls.NOT_READY


class PickerMetrics:
    """Metrics of one picker process. Its server reads them in threads of its own."""

    def __init__(self, endpoints: PoolMembers) -> None:
        self.registry = new_registry()
        self.registry.register(_MemberCollector(endpoints))
        picks = Counter(
            "moiety_endpoint_picker_picks",
            "Requests, by the outcome of the choice of a gateway.",
            ("outcome",),
            registry=self.registry,
        )
        probes = Counter(
            "moiety_endpoint_picker_probes", "Probes of gateways, by outcome.", ("outcome",), registry=self.registry
        )
        self._picks = {outcome: picks.labels(outcome) for outcome in PickOutcome}
        self._probes = {outcome: probes.labels(outcome) for outcome in ProbeOutcome}
        self._seconds = Histogram(
            "moiety_endpoint_picker_pick_seconds",
            "Time in which the picker chose a gateway and made the answer.",
            buckets=PICK_BUCKETS_S,
            registry=self.registry,
        )

    def note_pick(self, outcome: PickOutcome, seconds: float) -> None:
        """Count a request whose gateway was chosen, or that was refused."""
        self._picks[outcome].inc()
        self._seconds.observe(seconds)

    def note_probe(self, outcome: ProbeOutcome) -> None:
        """Count a probe that has ended."""
        self._probes[outcome].inc()


class _MemberCollector(Collector):
    def __init__(self, endpoints: PoolMembers) -> None:
        self._endpoints = endpoints

    def collect(self) -> Iterator[Metric]:
        counts = Counts(MemberState.of(member) for member in self._endpoints.all())
        family = GaugeMetricFamily(
            "moiety_endpoint_picker_members", "Gateways of the pool, by state.", labels=["state"]
        )
        for state in MemberState:
            family.add_metric([state], counts[state])
        yield family


@contextmanager
def serving_metrics(registry: CollectorRegistry, host: str, port: int) -> Iterator[int]:
    """Serve `/metrics` by HTTP until the block ends, and yield the port. Raises AddressUnavailable."""
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as exc:
        raise AddressUnavailable(f"cannot listen on {host}:{port}; choose another --metrics-port") from exc
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

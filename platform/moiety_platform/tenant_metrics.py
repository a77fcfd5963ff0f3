"""Prometheus metrics of tenants: a bounded number of series, for the recently busiest ones."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moiety_platform.usage.row import UsageRow

MAX_TENANTS = 20
OTHER = "other"  # never a tenant's id, since all begin with ten_
RANKED_EVERY_S = 60.0
RETAINED_RANKS = 2  # a tenant keeps its series while it ranks within this multiple of max_tenants
MAX_RECENT = 10_000  # tenants after which a ranking is forced without a scrape

TOO_MANY_REQUESTS = 429


class _SeriesCounts(msgspec.Struct):
    """Counts of one series."""

    requests: int = 0
    refused: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def add(self, row: UsageRow) -> None:
        self.requests += 1
        self.refused += row.http_status == TOO_MANY_REQUESTS
        self.input_tokens += row.prompt_tokens
        self.output_tokens += row.output_tokens

    def take(self, other: _SeriesCounts) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class TenantCollector(Collector):
    """Collector of the metrics of tenants, with a bounded number of series and bounded memory.

    The recently busiest tenants have series of their own; all others are summed as `other`. The ranking is updated when
    metrics are read, at most once a minute. The counts of a tenant that loses its series are added to `other`, so
    no series ever decreases; a new series starts at zero.
    """

    def __init__(self, max_tenants: int = MAX_TENANTS, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._max_tenants = max_tenants
        self._monotonic = monotonic
        self._shown: dict[str, _SeriesCounts] = {}
        self._other = _SeriesCounts()
        self._recent: defaultdict[str, int] = defaultdict(int)  # tokens and requests since the last ranking
        self._ranked_s = float("-inf")

    def use(self, max_tenants: int) -> None:
        """Change the number of tenants with series of their own, from the next scrape on."""
        self._max_tenants, self._ranked_s = max_tenants, float("-inf")

    def observe(self, row: UsageRow) -> None:
        """Count one ended request."""
        tenant_id = row.tenant_id
        self._recent[tenant_id] += 1 + row.prompt_tokens + row.output_tokens
        counts = self._shown.get(tenant_id)
        if counts is None and len(self._shown) < self._max_tenants:
            counts = self._shown[tenant_id] = _SeriesCounts()
        (counts or self._other).add(row)
        if len(self._recent) >= MAX_RECENT:
            self._rank()

    def collect(self) -> Iterator[Metric]:
        if self._monotonic() - self._ranked_s >= RANKED_EVERY_S:
            self._rank()
        requests = CounterMetricFamily(
            "moiety_tenant_requests",
            f"Requests by tenant: the recently busiest tenants, and all others as `{OTHER}`.",
            labels=["tenant"],
        )
        refused = CounterMetricFamily(
            "moiety_tenant_refused", "Requests rejected with HTTP 429, by tenant.", labels=["tenant"]
        )
        tokens = CounterMetricFamily("moiety_tenant_tokens", "Tokens by tenant and kind.", labels=["tenant", "kind"])
        for tenant_id, counts in (*self._shown.items(), (OTHER, self._other)):
            requests.add_metric([tenant_id], counts.requests)
            refused.add_metric([tenant_id], counts.refused)
            tokens.add_metric([tenant_id, "input"], counts.input_tokens)
            tokens.add_metric([tenant_id, "output"], counts.output_tokens)
        yield from (requests, refused, tokens)

    def _rank(self) -> None:
        """Assign the series to the tenants that were busiest since the last ranking.

        A tenant keeps its series while it is nearly as busy, or no other tenant needs one.
        """
        recent, self._recent = self._recent, defaultdict(int)
        self._ranked_s = self._monotonic()
        busiest = heapq.nlargest(self._max_tenants * RETAINED_RANKS, recent, key=recent.__getitem__)
        entering = [tenant_id for tenant_id in busiest[: self._max_tenants] if tenant_id not in self._shown]
        leaving = sorted(set(self._shown) - set(busiest))
        num_beyond = len(self._shown) - self._max_tenants  # if max_tenants was reduced
        for tenant_id in sorted(self._shown, key=lambda known_id: recent.get(known_id, 0))[: max(0, num_beyond)]:
            self._other.take(self._shown.pop(tenant_id))
        leaving = [tenant_id for tenant_id in leaving if tenant_id in self._shown]
        num_free = self._max_tenants - len(self._shown)
        for tenant_id in leaving[: max(0, len(entering) - num_free)]:
            self._other.take(self._shown.pop(tenant_id))
        for tenant_id in entering[: self._max_tenants - len(self._shown)]:
            self._shown[tenant_id] = _SeriesCounts()

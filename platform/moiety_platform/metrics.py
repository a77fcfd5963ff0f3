"""Prometheus metrics of the gateway's requests, listed in docs/metrics.md.

Labels are bounded: served models, service classes, outcomes and our own codes; tenants by `TenantCollector`. The
registry is passed as an argument. `engine_metrics` covers the engines' counters, `store_metrics` those of the store.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from moiety_platform.usage.row import UsageRow

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The conventions' buckets, extended: their TTFT stops at 10 s and their TPOT starts at 10 ms.
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
TPOT_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
DURATION_BUCKETS_S = tuple(0.01 * 2**i for i in range(16))  # the conventions' end at 81.92
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_REQUEST = ("model", "service_class")
_GEN_AI = ("operation", *_REQUEST)
MAX_TENANTS = 20
OTHER = "other"  # never a tenant's id, since all begin with ten_
RANKED_EVERY_S = 60.0
RETAINED_RANKS = 2  # a tenant keeps its series while it ranks within this multiple of max_tenants
MAX_RECENT = 10_000  # tenants after which a ranking is forced without a scrape

TOO_MANY_REQUESTS = 429


Labels = tuple[str, ...]


class LabeledCounters(Collector):
    """A counter per combination of labels, for one event loop, which every request updates many times.

    Counters of the library take locks, look up and check at each step, for threads that do not exist here.
    """

    def __init__(self, name: str, documentation: str, labels: Labels, registry: CollectorRegistry) -> None:
        self._describes = name, documentation, labels
        self._values: dict[Labels, int] = {}
        registry.register(self)

    def add(self, labels: Labels, amount: int = 1) -> None:
        """Add the amount; adding 0 creates the series, too."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def collect(self) -> Iterator[Metric]:
        name, documentation, labels = self._describes
        family = CounterMetricFamily(name, documentation, labels=labels)
        for values, count in self._values.items():
            family.add_metric(values, count)
        yield family


class LatencyHistograms(Collector):
    """A histogram per combination of labels, of seconds or ratios. `bounds` are the buckets' ascending upper bounds."""

    def __init__(
        self, name: str, documentation: str, labels: Labels, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._describes = name, documentation, labels
        self._bounds = tuple(bounds)
        self._bound_labels = [*map(floatToGoString, self._bounds), "+Inf"]
        self._counts: dict[Labels, list[int]] = {}  # by bucket
        self._sums: dict[Labels, float] = {}
        registry.register(self)

    def add(self, labels: Labels, seconds: float) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * len(self._bound_labels)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[labels] += seconds

    def collect(self) -> Iterator[Metric]:
        name, documentation, labels = self._describes
        family = HistogramMetricFamily(name, documentation, labels=labels)
        for values, counts in self._counts.items():
            up_to = list(zip(self._bound_labels, accumulate(counts), strict=True))
            family.add_metric(values, up_to, self._sums[values])
        yield family


class _FamilyCollector(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield from self._read()


def new_registry() -> CollectorRegistry:
    """Return a registry with the metrics of every process: its version, processor time, memory and open files."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # creation times are of no use, and double the number of series
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("moiety_build", "Version of the running package.", registry=registry).info({"version": version("moiety")})
    return registry


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


class Metrics:
    """Metrics of one gateway process."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        """Create the metrics. At most `max_tenants` tenants have series of their own."""
        self.registry = new_registry()
        self.tenants = TenantCollector(max_tenants)
        self.registry.register(self.tenants)
        self._make_counts()
        self._make_times()
        self._make_quotes()

    def _make_counts(self) -> None:
        registry = self.registry
        self._requests = LabeledCounters(
            "moiety_requests",
            "Authenticated generation requests, by outcome and HTTP status.",
            (*_REQUEST, "outcome", "status"),
            registry,
        )
        self._refused = Counter(
            "moiety_unauthenticated_requests",
            "Requests without a valid API key, by HTTP status.",
            ("status",),
            registry=registry,
        )
        self._idempotency = Counter(
            "moiety_idempotency",
            "Requests answered because of their Idempotency-Key: `replayed`, or an error code.",
            ("outcome",),
            registry=registry,
        )
        self._admissions = LabeledCounters(
            "moiety_admission",
            "Generation requests by admission decision; `service_class` is the requested class.",
            ("service_class", "outcome", "reason"),
            registry,
        )
        self._failovers = Counter(
            "moiety_failovers",
            "Sequences continued on another engine, by error code of the engine that failed.",
            ("model", "cause"),
            registry=registry,
        )
        self._routed = LabeledCounters(
            "moiety_route_requests",
            "Requests for a route, by the model that answered or failed last.",
            ("route", "model", "outcome"),
            registry,
        )
        self._route_fallbacks = LabeledCounters(
            "moiety_route_fallbacks",
            "Models of routes that failed before the first token, by error code.",
            ("route", "model", "cause"),
            registry,
        )
        self._shadows = LabeledCounters(
            "moiety_shadow_requests",
            "Copies of requests to the shadow model of a route: completed, failed or dropped.",
            ("route", "model", "outcome"),
            registry,
        )
        self._guardrails = LabeledCounters(
            "moiety_guardrail_checks",
            "Checks by guardrails: passed, blocked, observed, failed_open or failed_closed.",
            ("guardrail", "stage", "outcome"),
            registry,
        )
        self._errors = LabeledCounters(
            "moiety_request_errors",
            "Failed and rejected requests, by error code.",
            ("service_class", "code"),
            registry,
        )
        self._slo_requests = LabeledCounters(
            "moiety_slo_requests", "Ended requests that have an SLO, by attainment.", (*_REQUEST, "attained"), registry
        )
        self._tokens = LabeledCounters(
            "moiety_tokens",
            "Tokens by kind: input, cached input (part of input) and output.",
            (*_REQUEST, "kind"),
            registry,
        )
        self._good_tokens = LabeledCounters(
            "moiety_good_tokens",
            "Output tokens of requests that attained their SLO; the rate is the goodput.",
            _REQUEST,
            registry,
        )

    def _make_times(self) -> None:
        registry = self.registry
        self._queue = LatencyHistograms(
            "moiety_queue_time_seconds",
            "Time that requests waited in the engine's queue before they were scheduled.",
            _REQUEST,
            TTFT_BUCKETS_S,
            registry,
        )
        self._ttft = LatencyHistograms(
            "gen_ai_server_time_to_first_token_seconds",
            "Time to first token (TTFT), from arrival at the gateway.",
            _GEN_AI,
            TTFT_BUCKETS_S,
            registry,
        )
        self._tpot = LatencyHistograms(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per output token (TPOT) of a request after the first token, mean.",
            _GEN_AI,
            TPOT_BUCKETS_S,
            registry,
        )
        self._duration = LatencyHistograms(
            "gen_ai_server_request_duration_seconds",
            "Duration of requests, from arrival at the gateway to the end.",
            (*_GEN_AI, "outcome"),
            DURATION_BUCKETS_S,
            registry,
        )

    def _make_quotes(self) -> None:
        registry = self.registry
        self._guarantees = LabeledCounters(
            "moiety_quote_guarantees",
            "Ended requests with a quote's guarantee, by whether it was met.",
            (*_REQUEST, "met"),
            registry,
        )
        self._credits = LabeledCounters(
            "moiety_credit_nanodollars", "Credits for missed guarantees, in nano-dollars.", ("service_class",), registry
        )
        text = "Actual divided by predicted {} of requests with a quote; 1 is exact."
        self._ttft_error = LatencyHistograms(
            "moiety_quote_ttft_ratio", text.format("TTFT"), _REQUEST, RATIO_BUCKETS, registry
        )
        self._duration_error = LatencyHistograms(
            "moiety_quote_duration_ratio", text.format("duration"), _REQUEST, RATIO_BUCKETS, registry
        )

    def observe_quote(self, row: UsageRow, served_model: str) -> None:
        """Count one ended request with a quote: its guarantee, its credit and the error of its prediction."""
        labels = (served_model, row.service_class)
        if row.guarantee_met is not None:
            self._guarantees.add((*labels, "true"), int(row.guarantee_met))
            self._guarantees.add((*labels, "false"), int(not row.guarantee_met))
        if row.credit_nanodollars:
            self._credits.add((row.service_class,), row.credit_nanodollars)
        if row.predicted_ttft_ms and row.ttft_ms is not None:
            self._ttft_error.add(labels, row.ttft_ms / row.predicted_ttft_ms)
        if row.predicted_duration_ms:
            self._duration_error.add(labels, row.duration_ms / row.predicted_duration_ms)

    def observe_admission(self, service_class: str, outcome: str, reason: str) -> None:
        """Count one decision: requested class, admitted, downgraded or rejected, and the reason."""
        self._admissions.add((service_class, outcome, reason))

    def observe_failover(self, served_model: str, cause: str) -> None:
        self._failovers.labels(served_model, cause).inc()

    def observe_route(self, route: str, served_model: str, outcome: str) -> None:
        """Count one ended request for a route. `served_model` is as for `observe`."""
        self._routed.add((route, served_model, outcome))

    def observe_route_fallback(self, route: str, model: str, cause: str) -> None:
        """Count a model of a route that failed before the first token, so that the next one was tried."""
        self._route_fallbacks.add((route, model, cause))

    def observe_shadow(self, route: str, model: str, outcome: str) -> None:
        """Count a copy of a request to the shadow model of a route."""
        self._shadows.add((route, model, outcome))

    def observe_guardrail(self, name: str, stage: str, outcome: str) -> None:
        """Count a check of a text by a guardrail."""
        self._guardrails.add((name, stage, outcome))

    def observe_refusal(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def observe_idempotency(self, outcome: str) -> None:
        """Count a request that was not served because of its Idempotency-Key."""
        self._idempotency.labels(outcome).inc()

    def observe(self, row: UsageRow, operation: str, served_model: str, tpot_s: float | None) -> None:
        """Count one ended request. `served_model` is a served model or `unknown`, whatever the client requested."""
        request_labels = (served_model, row.service_class)
        operation_labels = (operation, *request_labels)
        self.tenants.observe(row)
        self._requests.add((*request_labels, row.outcome, str(row.http_status)))
        self._duration.add((*operation_labels, row.outcome), row.duration_ms / 1000)
        if row.error_code is not None:
            self._errors.add((row.service_class, row.error_code))
        if row.slo_attained is not None:  # both series always exist, so that their ratio does, too
            self._slo_requests.add((*request_labels, "true"), int(row.slo_attained))
            self._slo_requests.add((*request_labels, "false"), int(not row.slo_attained))
            if row.slo_attained and row.output_tokens:
                self._good_tokens.add(request_labels, row.output_tokens)
        if row.queue_ms is not None:
            self._queue.add(request_labels, row.queue_ms / 1000)
        if row.prompt_tokens:
            self._tokens.add((*request_labels, "input"), row.prompt_tokens)
        if row.cached_tokens:
            self._tokens.add((*request_labels, "cached_input"), row.cached_tokens)
        if row.output_tokens:
            self._tokens.add((*request_labels, "output"), row.output_tokens)
        if row.ttft_ms is not None:
            self._ttft.add(operation_labels, row.ttft_ms / 1000)
        if tpot_s is not None:
            self._tpot.add(operation_labels, tpot_s)

    def watch_statements(self, read: Callable[[], int]) -> None:
        """Report, at each scrape, the number of SQL statements sent so far."""
        self.watch(
            lambda: [CounterMetricFamily("moiety_sql_statements", "SQL statements sent by this process.", read())]
        )

    def watch(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Report, at each scrape, the metrics that `read` returns."""
        self.registry.register(_FamilyCollector(read))

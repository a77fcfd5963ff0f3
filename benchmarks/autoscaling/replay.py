"""Replay of a trace on an autoscaled pool, with a scrape of the gateways' metrics and a decision every 15 s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import helm_python
import yaml
from prometheus_client import generate_latest

from autoscaling.hpa import SYNC_S, Autoscaler, Terms
from autoscaling.prometheus import SCRAPE_S, Prometheus
from moiety_engine.simulator.driver import START_NS
from moiety_engine.simulator.metrics import tpot_s
from moiety_engine.simulator.pool import Pool, PoolTerms
from moiety_engine.simulator.records import Record
from moiety_platform.metrics import Metrics
from moiety_platform.usage.row import UsageRow
from moiety_workload.request import Workload

CHART = Path(__file__).parents[2] / "helm" / "moiety"
MODEL = "replayed"
SCRAPED_AFTER_S = 7.0  # a scrape and a decision do not fall together
WINDOW_S = 300.0  # over which attainment is told
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Outcome:
    """Result of a replay. `sizes` are (time, wanted, ready) at each decision."""

    duration_s: float
    sizes: list[tuple[float, int, int]] = field(default_factory=list)
    ended: list[Record] = field(default_factory=list)
    num_lost: int = 0
    device_s: float = 0.0

    def attainment(self) -> float:
        return sum(one.attained for one in self.ended) / (len(self.ended) + self.num_lost)

    def windows(self) -> list[tuple[float, float, int]]:
        """Return (time, SLO attainment, arrivals) of the requests that arrived within each window."""
        found: dict[int, list[bool]] = {}
        for one in self.ended:
            found.setdefault(int((one.arrival_ns - START_NS) / 1e9 // WINDOW_S), []).append(one.attained)
        return [(at * WINDOW_S, sum(kept) / len(kept), len(kept)) for at, kept in sorted(found.items())]

    def turns(self) -> int:
        """Return how often the number of devices began to rise after it had fallen."""
        wanted = [count for _, count, _ in self.sizes]
        moves = [after - before for before, after in pairwise(wanted) if after != before]
        return sum(before < 0 < after for before, after in pairwise(moves))

    def figures(self) -> dict[str, Any]:
        kept = self.windows()
        classes = sorted({one.request.service_class for one in self.ended})
        return {
            "attainment": self.attainment(),
            "classes": {
                name: sum(one.attained for one in mine) / len(mine)
                for name in classes
                if (mine := [one for one in self.ended if one.request.service_class == name])
            },
            "worst_window": min(share for _, share, _ in kept),
            "windows_below_95": sum(share < 0.95 for _, share, _ in kept),
            "rejected": sum(one.failure is not None for one in self.ended),
            "requests": len(self.ended) + self.num_lost,
            "device_hours": self.device_s / 3600,
            "most": max(count for _, count, _ in self.sizes),
            "least": min(count for _, count, _ in self.sizes),
            "turns": self.turns(),
        }


def scaled_object(autoscaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return KEDA's object, as the chart renders it with these values."""
    pool = {"name": "replayed", "model": {"name": MODEL, "hub": "a/b"}, "autoscaling": {"enabled": True, **autoscaling}}
    with helm_python.Chart.load(CHART) as chart:
        text = chart.render({"engines": [pool]}, name="rel", namespace="prod")[
            "moiety/templates/engines/autoscaling.yaml"
        ]
    (found,) = [one for one in yaml.safe_load_all(text) if one]
    return dict(found)


def replay(workload: Workload, terms: PoolTerms, scaling: Terms, first: int) -> Outcome:
    """Replay the trace from this number of devices on."""
    pool, gateway, prometheus = Pool(workload, terms, first), Metrics(), Prometheus()
    now_s = 0.0
    autoscaler = Autoscaler(scaling, lambda query: prometheus.read(query, now_s))
    outcome = Outcome(workload.duration_s)
    scraped_s = SCRAPED_AFTER_S
    while not pool.is_done or now_s < workload.duration_s:
        while scraped_s <= now_s + SYNC_S:
            _tell(gateway, outcome, pool.advance(scraped_s))
            prometheus.scrape(scraped_s, generate_latest(gateway.registry).decode())
            scraped_s += SCRAPE_S
        now_s += SYNC_S
        _tell(gateway, outcome, pool.advance(now_s))
        pool.resize(autoscaler.decide(now_s, pool.size, pool.num_ready))
        if now_s <= workload.duration_s:
            outcome.sizes.append((now_s, pool.size, pool.num_ready))
    outcome.num_lost, outcome.device_s = pool.num_lost, pool.device_s
    return outcome


def fixed(workload: Workload, terms: PoolTerms, count: int) -> Outcome:
    """Replay the trace with a fixed number of devices."""
    pool, outcome = Pool(workload, terms, count), Outcome(workload.duration_s)
    while not pool.is_done:
        outcome.ended += pool.advance(pool.now_s + SYNC_S)
        outcome.sizes.append((pool.now_s, count, count))
    outcome.device_s = pool.device_s
    return outcome


def _tell(gateway: Metrics, outcome: Outcome, ended: Sequence[Record]) -> None:
    """Count the requests that have ended, as a gateway counts them."""
    outcome.ended += ended
    for one in ended:
        gateway.observe(_row(one), "chat", MODEL, tpot_s(one))


def _row(one: Record) -> UsageRow:
    rejected = one.failure is not None
    return UsageRow(
        request_id=str(one.key), tenant_id=one.request.tenant, project_id="", key_id="", endpoint="/v1/completions",
        model=MODEL, service_class=one.request.service_class,
        started_at=EPOCH + timedelta(seconds=(one.arrival_ns - START_NS) / 1e9),
        outcome="rejected" if rejected else "stop", http_status=429 if rejected else 200, num_choices=1,
        prompt_tokens=one.request.input_tokens, cached_tokens=one.cached_tokens, output_tokens=one.num_output,
        queue_ms=(one.scheduled_ns - one.arrival_ns) / 1e6 if one.scheduled_ns else None,
        ttft_ms=(one.first_ns - one.arrival_ns) / 1e6 if one.first_ns else None,
        duration_ms=(one.end_ns - one.arrival_ns) / 1e6, slo_attained=one.attained,
    )  # fmt: skip

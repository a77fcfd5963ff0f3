"""The replay of the chart's autoscalers: its arithmetic by the examples of their documentation, and a small pool that
follows its load up and down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.pool import Pool, PoolTerms
from moiety_wire.classes import STANDARD
from moiety_workload.request import TraceRequest, Workload

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEVICE = SimulatedDevice(
    name="slow", overhead_s=0.4, token_s=1e-4, kv_token_s=0.0, pair_s=0.0, kv_tokens=4096, max_running=4,
    max_batch_tokens=256, kv_token_bytes=1,
)  # fmt: skip
PATIENT = msgspec.structs.replace(STANDARD, ttft_s=8.0, tpot_s=None, max_queue_s=60.0)
TERMS = PoolTerms(DEVICE, "moiety", {STANDARD.name: PATIENT}, start_s=30.0)


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, which lies among the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from autoscaling import hpa, prometheus, replay

    class Replaying:
        pass

    for module in (hpa, prometheus, replay):
        setattr(Replaying, module.__name__.rpartition(".")[2], module)
    return Replaying


@pytest.mark.parametrize(
    ("value", "is_average", "current", "ready", "wanted"),
    [
        (200.0, False, 4, 4, 8),  # twice the target of 100: twice as many
        (50.0, False, 4, 4, 2),
        (109.0, False, 4, 4, 4),  # within a tenth
        (150.0, False, 4, 2, 3),  # by those that are ready
        (1000.0, True, 4, 4, 10),  # divided among them: 250 each, where 100 is aimed at
        (420.0, True, 4, 4, 4),
        (0.0, True, 4, 4, 0),
    ],
)
def test_a_metric_proposes_what_kubernetes_documents(
    replaying: Any, value: float, is_average: bool, current: int, ready: int, wanted: int
) -> None:
    metric = replaying.hpa.Metric("m", "q", 100.0, is_average)
    assert replaying.hpa.propose(metric, value, current, ready) == wanted


def autoscaler(
    hpa: Any, values: Any, up: Sequence[Any] = (), down: Sequence[Any] = (), windows: tuple[float, ...] = (0.0, 0.0)
) -> Any:
    """One on a metric whose values come in turn, from one replica to twenty."""
    metric = hpa.Metric("m", "q", 1.0, is_average=True)
    rules = [hpa.Rules(window, list(policies)) for window, policies in zip(windows, (up, down), strict=True)]
    taken = iter(values)
    return hpa.Autoscaler(hpa.Terms(1, 20, [metric], *rules), lambda query: next(taken))


def decisions(one: Any, count: int, first: Any) -> Any:
    wanted, current = [], first
    for number in range(count):
        current = one.decide(15.0 * number, current, current)
        wanted.append(current)
    return wanted


def test_policies_bound_how_fast_it_goes(replaying: Any) -> None:
    fast = [("Percent", 100, 60)], [("Pods", 1, 120)]
    up = autoscaler(replaying.hpa, [20.0] * 9, *fast)
    assert decisions(up, 9, 2) == [4, 4, 4, 4, 8, 8, 8, 8, 16]
    down = autoscaler(replaying.hpa, [1.0] * 9, *fast)
    assert decisions(down, 9, 6) == [5, 5, 5, 5, 5, 5, 5, 5, 4]


def test_a_dip_shorter_than_the_window_takes_nothing_away(replaying: Any) -> None:
    any_pace = [("Pods", 20, 15)], [("Pods", 20, 15)]
    one = autoscaler(replaying.hpa, [4.0, 1.0, 4.0, *[1.0] * 6], *any_pace, windows=(0.0, 60.0))
    assert decisions(one, 9, 4) == [4, 4, 4, 4, 4, 4, 1, 1, 1]


EXPOSITION = """# TYPE wait histogram
wait_bucket{{model="m",le="1.0"}} {low}
wait_bucket{{model="m",le="2.0"}} {high}
wait_bucket{{model="m",le="+Inf"}} {high}
# TYPE made counter
made_total{{model="m",kind="output"}} {made}
made_total{{model="n",kind="output"}} 1000
"""


def test_queries_are_computed_as_prometheus_does(replaying: Any) -> None:
    prometheus = replaying.prometheus.Prometheus()
    for number in range(9):
        text = EXPOSITION.format(low=6 * number, high=12 * number, made=30 * number)
        prometheus.scrape(15.0 * number, text)
    made = 'sum(rate(made_total{model="m",kind="output"}[1m]))'
    assert prometheus.read(made, 120.0) == pytest.approx(2.0)
    assert prometheus.read(f"clamp_max({made}, 1.5)", 120.0) == 1.5
    wait = 'histogram_quantile(0.9, sum by (le) (rate(wait_bucket{model="m"}[1m])))'
    assert prometheus.read(wait, 120.0) == pytest.approx(1.8)
    nothing = 'sum(rate(made_total{model="m",kind="none"}[1m]))'
    assert prometheus.read(nothing, 120.0) == 0.0
    still = 'sum(rate(made_total{model="n"}[1m]))'
    assert prometheus.read(f"{still} / {still}", 120.0) == 0.0  # no number, as KEDA takes it
    with pytest.raises(replaying.prometheus.UnknownQuery, match="not computed here"):
        prometheus.read('delta(made_total{model="m"}[1m])', 120.0)


def arriving(*phases: tuple[float, float]) -> Workload:
    """Requests at (seconds, rate), one after the other, evenly."""
    requests, begin_s = [], 0.0
    for duration_s, rate in phases:
        times = [begin_s + number / rate for number in range(math.floor(duration_s * rate))]
        requests += [TraceRequest(at_s, "t", 16, 10, STANDARD.name) for at_s in times]
        begin_s += duration_s
    return Workload("phases", tuple(requests), begin_s)


def test_a_pool_follows_its_load_up_before_slos_are_missed_and_down_once(replaying: Any) -> None:
    settings = {"tokensPerSecond": 5, "scaleDownStabilizationSeconds": 180, "maxReplicas": 6}
    terms = replaying.hpa.Terms.of_scaled_object(replaying.replay.scaled_object(settings))
    workload = arriving((180, 0.4), (60, 0.7), (60, 1.0), (300, 1.3), (900, 0.4))
    outcome = replaying.replay.replay(workload, TERMS, terms, first=1)
    wanted = [count for _, count, _ in outcome.sizes]
    assert (wanted[0], max(wanted), wanted[-1], outcome.turns()) == (1, 3, 1, 0)
    assert outcome.attainment() == 1.0
    assert len(outcome.ended) == len(workload.requests)


def test_a_pool_loses_nothing_while_devices_leave_and_counts_what_finds_none() -> None:
    workload = arriving((60, 1.0))
    pool = Pool(workload, TERMS, 2)
    ended = pool.advance(30.0)
    pool.resize(1)
    while not pool.is_done:
        ended += pool.advance(pool.now_s + 5.0)
    assert sorted(one.request.arrival_s for one in ended) == [one.arrival_s for one in workload.requests]
    assert all(one.num_output == 10 for one in ended)
    empty = Pool(workload, replace(TERMS, start_s=45.0), 0)
    empty.resize(1)
    ended = empty.advance(200.0)
    assert (empty.num_lost, len(ended)) == (45, 15)

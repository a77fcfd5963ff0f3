"""Scenarios and their variants, each of which can run in its own process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from autoscaling.hpa import Terms
from autoscaling.replay import Outcome, fixed, replay, scaled_object
from moiety_engine.simulator.capacity import Capacity, at_load, measure_capacity
from moiety_engine.simulator.devices import A100_LLAMA3_8B
from moiety_engine.simulator.pool import PoolTerms
from moiety_wire.classes import SHIPPED
from moiety_workload.readers import load_workload
from moiety_workload.request import Workload
from moiety_workload.transforms import cut, last_for

DEVICE = A100_LLAMA3_8B
START_S = 120.0  # from a pod's making to its first request: pulled, loaded, found by its name
WELL_USED = 0.5  # of what a device can do: what tokensPerSecond is to say, by docs/install.md
MOST = 6
SEED = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """Scenario: `make` converts the trace to arrivals, in devices' capacity; `first` is the initial device count."""

    trace: str
    make: Callable[[Workload, Capacity], Workload]
    first: int


def a_day(trace: Workload, capacity: Capacity) -> Workload:
    """Return a day compressed into an hour: from 0.3 to 2.2 devices' worth and back."""
    duration_s, low, high = 3600.0, 0.3, 2.2
    busiest = at_load(last_for(trace, duration_s), capacity, high, SEED)
    rng = Random(f"day {SEED}")

    def share(time_s: float) -> float:
        return (low + (high - low) * (1 - math.cos(2 * math.pi * time_s / duration_s)) / 2) / high

    kept = tuple(one for one in busiest.requests if rng.random() < share(one.arrival_s))
    return replace(busiest, requests=kept)


def as_it_came(trace: Workload, capacity: Capacity) -> Workload:
    """Return the first 40 minutes of the trace with its own bursts, at one and a half devices' worth."""
    return cut(at_load(trace, capacity, 1.5, SEED), 0.0, 2400.0)


SCENARIOS = {
    "diurnal": Scenario("azure2023/AzureLLMInferenceTrace_conv.csv", a_day, 2),
    "bursty": Scenario("azure2023/AzureLLMInferenceTrace_code.csv", as_it_came, 4),
}


CHART, QUEUE_ALONE, MAX_THROUGHOUT = "chart", "queue time alone", f"{MOST} devices throughout"
VARIANTS = (CHART, QUEUE_ALONE, MAX_THROUGHOUT)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Arrivals, the pool's values, the rendered objects, the load in devices, and a device's tokens/s."""

    workload: Workload
    settings: Mapping[str, int]
    terms: Terms
    load: float
    tokens_per_s: float


def prepare(name: str, traces: Path) -> Prepared:
    """Prepare the data that all variants of a scenario share."""
    scenario = SCENARIOS[name]
    trace = load_workload(traces / scenario.trace)
    workload = scenario.make(trace, measure_capacity(trace, DEVICE))
    capacity = measure_capacity(workload, DEVICE)
    tokens_per_s = sum(one.output_tokens for one in workload.requests) / workload.duration_s / capacity.offered
    settings = {"tokensPerSecond": round(WELL_USED * tokens_per_s), "minReplicas": 2, "maxReplicas": MOST}
    terms = Terms.of_scaled_object(scaled_object(settings))
    return Prepared(workload, settings, terms, capacity.offered, tokens_per_s)


def run(name: str, variant: str, prepared: Prepared) -> Mapping[str, Any]:
    """Run one variant, in its own process."""
    pool = PoolTerms(DEVICE, "moiety", {one.name: one for one in SHIPPED}, START_S)
    if variant == MAX_THROUGHOUT:
        return _told(fixed(prepared.workload, pool, MOST))
    terms = prepared.terms
    if variant == QUEUE_ALONE:
        terms = replace(terms, metrics=[one for one in terms.metrics if one.name == "queue-time"])
    return _told(replay(prepared.workload, pool, terms, SCENARIOS[name].first))


def _told(outcome: Outcome) -> Mapping[str, Any]:
    return {
        "figures": outcome.figures(),
        "sizes": [(time_s, wanted, ready) for time_s, wanted, ready in outcome.sizes if time_s % 60 == 0],
        "kept": [(time_s, share) for time_s, share, _ in outcome.windows()],
    }


def per_minute(workload: Workload) -> list[int]:
    counts = [0] * math.ceil(workload.duration_s / 60)
    for one in workload.requests:
        counts[int(one.arrival_s // 60)] += 1
    return counts

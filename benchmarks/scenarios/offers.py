"""Loads of the scenarios and the start of a run: traces, loads, classes, variants of our policy.

Results that several scenarios of one process need are cached in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from random import Random

from msgspec.structs import replace as change

from moiety_engine.scheduling.policies.moiety.moiety import Moiety
from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_engine.scheduling.policies.policy_interface import PolicyContext
from moiety_engine.scheduling.policies.registry import POLICIES
from moiety_engine.simulator.capacity import Capacity, at_load, measure_capacity
from moiety_engine.simulator.devices import A100_LLAMA3_8B
from moiety_wire.classes import STANDARD, OverloadAction, ServiceClass
from moiety_workload.readers import load_workload
from moiety_workload.request import TraceRequest, Workload
from moiety_workload.tenants import assign_classes
from moiety_workload.transforms import cut, last_for

SERVEGEN = "servegen_m_small_1h.csv"
AZURE_CODE = "azure2023/AzureLLMInferenceTrace_code.csv"
VTC_REAL = "vtc_lmsys_real/vtc_real_trace.csv"
MOONCAKE = "mooncake_fast25/conversation_trace.jsonl"

# All requests queue, none is rejected and there is no SLO: the comparison is of the service that each tenant gets.
PATIENT = change(STANDARD, ttft_s=3600.0, ttft_per_1k_s=0.0, tpot_s=None, on_overload=OverloadAction.QUEUE)

SHARES = {"priority": 0.2, "standard": 0.5, "batch": 0.3}  # of the demanded work; at 2 C, priority asks for 0.4 C


@lru_cache(maxsize=8)
def load(traces: Path, name: str, seed: int = 0) -> Workload:
    return load_workload(traces / name, seed=seed)


@lru_cache(maxsize=8)
def tenants_mix(traces: Path, start_s: float, duration_s: float) -> tuple[Workload, Capacity]:
    """Return a window of the tenants' trace, and the A100 preset's capacity for its mix."""
    trace = load(traces, SERVEGEN)
    window = cut(trace, start_s % trace.duration_s, duration_s) if duration_s < trace.duration_s else trace
    window = last_for(window, duration_s)
    return window, measure_capacity(window, A100_LLAMA3_8B)


def overloaded_mix(traces: Path, seed: int, duration_s: float, load_factor: float = 2.0) -> tuple[Workload, Capacity]:
    """Return a window of the tenants' trace at a multiple of the capacity, its tenants in three classes."""
    window, capacity = tenants_mix(traces, seed * 600.0, duration_s)
    offered = at_load(window, capacity, load_factor, seed)
    classed = assign_classes(offered.requests, SHARES, capacity.model.of_request, seed)
    return replace(offered, requests=tuple(classed)), capacity


def poisson_at(lengths: Sequence[TraceRequest], rate_per_s: float, duration_s: float, seed: int) -> list[TraceRequest]:
    """Return independent arrivals with a trace's lengths in its order, from a seeded position on.

    Another rate moves the same requests closer together.
    """
    rng = Random(f"arrivals {seed}")
    start = rng.randrange(len(lengths))
    requests: list[TraceRequest] = []
    due = rng.expovariate(1.0)
    for number in count(start):
        if due / rate_per_s >= duration_s:
            return requests
        requests.append(replace(lengths[number % len(lengths)], arrival_s=due / rate_per_s))
        due += rng.expovariate(1.0)
    raise AssertionError("the count has no end")


def draw_classes(
    requests: Iterable[TraceRequest], names: Sequence[str], seed: int, *, weights: Sequence[float] = ()
) -> tuple[TraceRequest, ...]:
    """Draw a class for each request; with the same seed, the n-th request gets the same class whatever its time."""
    rng = Random(f"classes {seed}")
    chosen = weights or [1.0] * len(names)
    return tuple(replace(request, service_class=rng.choices(names, chosen)[0]) for request in requests)


def qoserve_classes(rank: int = 1, suffix: str = "") -> list[ServiceClass]:
    """Return QoServe's classes: a stream with 6 s and 50 ms, and ends within 600 s and 1,800 s. None is rejected."""
    queue = OverloadAction.QUEUE
    return [
        ServiceClass(name=f"stream{suffix}", rank=rank, ttft_s=6.0, tpot_s=0.05, on_overload=queue),
        ServiceClass(name=f"in-600-s{suffix}", rank=rank, completion_s=600.0, on_overload=queue),
        ServiceClass(name=f"in-1800-s{suffix}", rank=rank, completion_s=1800.0, max_queue_s=1800.0, on_overload=queue),
    ]


def variant(name: str, tuning: Tuning) -> str:
    """Return our policy with other constants, under a name that is known in this process only."""

    def make(context: PolicyContext) -> Moiety:
        return Moiety(context, tuning)

    POLICIES[name] = make
    return name

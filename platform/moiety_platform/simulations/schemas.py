"""Request and response bodies of the admin API for simulations."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec

from moiety_platform.classes.schemas import ClassChange
from moiety_platform.openapi.schemas import shows
from moiety_workload.simulations import DEVICES, POLICIES

MAX_MINUTES = 60
MAX_TIMES = 100.0
MIN_TIMES = 0.01
MAX_REPLICAS = 1000
MAX_SPEC_LENGTH = 1000

Replicas = Annotated[int, shows(minimum=1, maximum=MAX_REPLICAS)]


class NewSimulation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A simulation of the traffic of the last `minutes` under two sets of settings.

    The first run uses the current classes and policy and `replicas_now` replicas, the second one the settings of this
    request. `times` multiplies the arrival rate. The step time is that of the engine `engine_id`, or of the preset
    `device`: one of the two. `model` leaves out other models' requests. `generate` generates arrivals instead, such as
    `poisson:rate=3,tenants=8,input=256,output=128`.
    """

    device: Annotated[str, shows(enum=list(DEVICES))] | None = None
    engine_id: str | None = None
    minutes: Annotated[int, shows(minimum=1, maximum=MAX_MINUTES)] = MAX_MINUTES
    times: Annotated[float, shows(minimum=MIN_TIMES, maximum=MAX_TIMES)] = 1.0
    replicas_now: Replicas = 1
    replicas: Replicas = 1
    policy: Annotated[str, shows(enum=list(POLICIES))] = POLICIES[0]
    model: str | None = None
    generate: Annotated[str, shows(maxLength=MAX_SPEC_LENGTH)] | None = None
    classes: dict[str, ClassChange] = {}


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds; null where nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None


class ClassMetrics(msgspec.Struct, frozen=True):
    """Results of one class. `demand_share` is its share of the requested work."""

    attainment: float
    demand_share: float
    num: float
    num_rejected: float
    num_downgraded: float
    num_preemptions: float
    longest_wait_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles


class VariantMetrics(msgspec.Struct, frozen=True):
    """Results of all requests at one replica. The capacity is its throughput at saturation under FCFS."""

    classes: dict[str, ClassMetrics]
    attainment: float
    offered_fraction_of_capacity: float
    completed_fraction_of_capacity: float
    goodput_fraction_of_capacity: float
    throughput_tokens_per_s: float
    wasted_prefill_fraction: float
    recomputed_fraction: float
    preemptions: float
    longest_wait_s: float
    kv_used_fraction: float
    num_requests: int


class Compared(msgspec.Struct, frozen=True):
    """Results of both runs.

    `num_requests` arrived in the time. `num_unserved` more had no lengths, for example because they were refused, and
    are left out.
    """

    device: str
    num_requests: int
    num_unserved: int
    now: VariantMetrics
    then: VariantMetrics


class SimulationView(msgspec.Struct, frozen=True):
    """A simulation: `running`, `done`, `cancelled`, or `failed`, with the reason in `problem`.

    `settings` are the fields of the request, including the changes of classes.
    """

    id: str
    state: str
    created_at: datetime
    settings: dict[str, Any]
    result: Compared | None
    problem: str | None


class SimulationViews(msgspec.Struct, frozen=True):
    """The last simulations, newest first, and the names of devices and policies."""

    data: list[SimulationView]
    devices: list[str]
    policies: list[str]

"""Comparison of several policies on the same arrivals, over one or more seeds, for `moiety simulate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from moiety_engine.errors import InvalidConfig
from moiety_engine.simulator.capacity import Capacity, at_load, measure_capacity
from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.replica import check_policy
from moiety_engine.simulator.simulate import simulate
from moiety_engine.simulator.work import WorkModel
from moiety_wire import class_targets
from moiety_wire.class_targets import BadClassTargets
from moiety_wire.classes import SHIPPED, ServiceClass
from moiety_workload.generators import generate
from moiety_workload.readers import load_workload
from moiety_workload.request import Workload
from moiety_workload.tenants import assign_classes
from moiety_workload.transforms import last_for, multiply, scale_lengths

_DEFAULT_GENERATED_S = 600.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Source of the arrivals and the transforms applied to them. Exactly one of `trace` and `spec` is set."""

    trace: Path | None = None
    spec: str | None = None
    num_tenants: int = 20  # tenants that a trace's conversations are spread over, where it has conversations
    scale: float = 1.0
    duration_s: float | None = None
    load: float | None = None  # multiple of the capacity; None: the arrivals as they are
    times: float = 1.0  # factor on the arrivals, where `load` is None
    num_replicas: int = 1  # replicas; one is simulated with its share of the requests
    shares: Mapping[str, float] | None = None
    weights: Mapping[str, float] = field(default_factory=dict)

    def base(self, device: SimulatedDevice, seed: int) -> Workload:
        """Return the arrivals and their classes, before scaling to a load. Raises WorkloadError, InvalidConfig."""
        if (self.trace is None) == (self.spec is None):
            raise InvalidConfig("set either a trace or a generator, not both")
        if self.trace is not None:
            workload = load_workload(self.trace, seed=seed, num_tenants=self.num_tenants)
        else:
            workload = generate(self.spec or "", self.duration_s or _DEFAULT_GENERATED_S, seed)
        if self.scale != 1.0:
            scaled = tuple(scale_lengths(workload.requests, self.scale))
            workload = replace(workload, requests=scaled, prefix_block_tokens=None)
        if self.duration_s is not None:
            workload = last_for(workload, self.duration_s)
        if self.shares is not None:
            work = WorkModel.of(device, workload.requests).of_request
            workload = replace(workload, requests=tuple(assign_classes(workload.requests, self.shares, work, seed)))
        return replace(workload, weights={**workload.weights, **self.weights})

    def offered(self, base: Workload, capacity: Capacity, seed: int) -> Workload:
        """Return the arrivals of the one replica; `capacity` holds the load of `base`.

        Raises WorkloadError, InvalidConfig.
        """
        if self.load is not None:
            if (self.times, self.num_replicas) != (1.0, 1):
                raise InvalidConfig("set either --load, or --times and --replicas")
            return at_load(base, capacity, self.load, seed)
        factor = self.times / self.num_replicas
        return base if factor == 1 else multiply(base, factor, capacity.model.of_request, seed)


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """LoadMetrics of each policy over the seeds.

    LoadMetrics are means over the seeds, or maxima for figures named max or longest. With several seeds, `per_seed`
    holds the figures of each.
    """

    capacity: Capacity
    duration_s: float
    num_requests: int
    policies: dict[str, dict[str, Any]]


def compare(
    scenario: Scenario,
    device: SimulatedDevice,
    policies: Sequence[str],
    *,
    classes: Iterable[ServiceClass] = SHIPPED,
    seeds: Sequence[int] = (0,),
    max_tokens: int | None = None,
    drain: bool = True,
    on_progress: Callable[[str, int, float, int], None] | None = None,
) -> PolicyComparison:
    """Run every policy on every seed's arrivals.

    The capacity is measured once, on the first seed's arrivals before they are scaled to the load. `on_progress` takes
    (policy, seed, fraction, open requests). Raises InvalidConfig, WorkloadError, Stuck.
    """
    for policy in policies:
        check_policy(policy)
    listed = tuple(classes)
    figures: dict[str, dict[int, dict[str, Any]]] = {policy: {} for policy in policies}
    capacity: Capacity | None = None
    workload: Workload | None = None
    for seed in seeds:
        base = scenario.base(device, seed)
        capacity = capacity or measure_capacity(base, device)
        own = replace(capacity, offered=capacity.model.offered_per_s(base) / capacity.work_per_s)
        workload = scenario.offered(base, own, seed)
        for policy in policies:
            report = None if on_progress is None else _bind(on_progress, policy, seed)
            outcome = simulate(
                workload,
                device,
                policy,
                classes=listed,
                capacity=capacity,
                max_tokens=max_tokens,
                drain=drain,
                on_progress=report,
            )
            figures[policy][seed] = outcome.figures
    if capacity is None or workload is None:
        raise InvalidConfig("a simulation needs at least one seed")
    merged = {policy: _merge(per_seed) for policy, per_seed in figures.items()}
    return PolicyComparison(capacity, workload.duration_s, len(workload.requests), merged)


def read_classes(path: Path) -> tuple[ServiceClass, ...]:
    """Return the built-in classes with the changes and additions of a file. Raises InvalidConfig."""
    try:
        return class_targets.read_classes(path)
    except BadClassTargets as exc:
        raise InvalidConfig(str(exc)) from exc


def _bind(on_progress: Callable[[str, int, float, int], None], policy: str, seed: int) -> Callable[[float, int], None]:
    return lambda fraction, num_open: on_progress(policy, seed, fraction, num_open)


def _merge(per_seed: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Merge the figures over the seeds. LoadMetrics of tenants come from the first seed only."""
    first = next(iter(per_seed.values()))
    if len(per_seed) == 1:
        return first
    bare = [{key: value for key, value in figures.items() if key != "tenants"} for figures in per_seed.values()]
    merged = _mean("", bare)
    merged["tenants"] = first["tenants"]
    merged["per_seed"] = {str(seed): figures for seed, figures in zip(per_seed, bare, strict=True)}
    return dict(merged)


def _mean(name: str, values: list[Any]) -> Any:
    """Average dicts by key (a missing count is 0) and numbers; take the maximum where the name says so."""
    if any(isinstance(value, dict) for value in values):
        tables = [value for value in values if isinstance(value, dict)]
        keys = dict.fromkeys(key for table in tables for key in table)
        missing = 0 if name == "rejections" else None
        return {key: _mean(key, [table.get(key, missing) for table in tables]) for key in keys}
    known = [value for value in values if value is not None]
    if not known:
        return None
    return max(known) if name.startswith(("max_", "longest_", "forbidden_")) else fmean(known)

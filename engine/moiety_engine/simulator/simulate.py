"""Entry point of the simulator: one workload, one device, one policy, one outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec

from moiety_engine.errors import InvalidConfig
from moiety_engine.simulator.capacity import Capacity, measure_capacity
from moiety_engine.simulator.devices import SimulatedDevice, find_device
from moiety_engine.simulator.driver import Driver
from moiety_engine.simulator.metrics import summarise
from moiety_engine.simulator.records import Run
from moiety_engine.simulator.replica import NO_BIAS, PredictionBias
from moiety_wire.classes import SHIPPED, ServiceClass
from moiety_workload.request import Workload


@dataclass(frozen=True)
class SimulationOutcome:
    """Outcome of a simulation: the run with every record, and its figures (computed on first access)."""

    policy: str
    device: SimulatedDevice
    capacity: Capacity
    run: Run = field(repr=False)

    @cached_property
    def figures(self) -> dict[str, Any]:
        return summarise(self.run, self.device, self.capacity)


def simulate(
    workload: Workload,
    device: SimulatedDevice | str,
    policy: str = "fcfs",
    *,
    classes: Iterable[ServiceClass] = SHIPPED,
    capacity: Capacity | None = None,
    biases: PredictionBias = NO_BIAS,
    max_tokens: int | None = None,
    max_batch_tokens: int | None = None,
    drain: bool = True,
    on_progress: Callable[[float, int], None] | None = None,
) -> SimulationOutcome:
    """Run a workload through the real scheduler.

    Without a `capacity`, it is measured first (by FCFS on this workload's mix); pass one to compare several runs.
    `biases` falsify the scheduler's predictions. `max_tokens` is the one bound on answers that all requests carry (by
    default the trace's longest). `max_batch_tokens` replaces the device's. Raises InvalidConfig, Stuck.
    """
    chosen = find_device(device) if isinstance(device, str) else device
    if max_batch_tokens is not None:
        chosen = msgspec.structs.replace(chosen, max_batch_tokens=max_batch_tokens)
    named = {service.name: service for service in classes}
    unknown = sorted({request.service_class for request in workload.requests} - set(named))
    if unknown:
        raise InvalidConfig(
            f"the workload has requests of class {', '.join(unknown)}, which is not among {', '.join(named)}: assign "
            "classes to its tenants, or describe the class"
        )
    if capacity is None:
        capacity = measure_capacity(workload, chosen)
    driver = Driver(
        workload,
        chosen,
        policy,
        named,
        biases=biases,
        max_tokens=max_tokens,
        drain=drain,
        on_progress=on_progress,
    )
    return SimulationOutcome(policy, chosen, capacity, driver.run())

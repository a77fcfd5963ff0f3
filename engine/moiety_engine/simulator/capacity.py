"""Capacity of a device for a workload's mix: the work per second of saturated FCFS; and loads relative to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.driver import Driver
from moiety_engine.simulator.work import WorkModel
from moiety_wire.classes import STANDARD
from moiety_workload.request import Workload
from moiety_workload.transforms import last_for, multiply

_PRESSURE = 2.0  # times the device's throughput: the queue never empties
_NUM_STEPS = 3000  # approximate steps of the run
_SHORTEST_S, _LONGEST_S = 20.0, 300.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity `work_per_s` (C), in the units of `model`. `offered`: the workload's own load as a multiple of C."""

    work_per_s: float
    model: WorkModel
    offered: float


def measure_capacity(workload: Workload, device: SimulatedDevice, *, run_s: float | None = None) -> Capacity:
    """Run FCFS on the workload's requests in their order, arriving faster than they can be served.

    A long trace is sampled at regular distances, unless requests share prefixes: then its first requests are used.
    `run_s`: duration of the run, by default some thousand steps.
    """
    model = WorkModel.of(device, workload.requests)
    seconds = run_s or min(_LONGEST_S, max(_SHORTEST_S, _NUM_STEPS * model.step_s))
    wanted = _PRESSURE * seconds
    demand = sum(model.of_request(request) for request in workload.requests)
    long_enough = workload if demand >= wanted else last_for(workload, workload.duration_s * wanted / demand)
    stride = 1 if workload.prefix_block_tokens else max(1, int(demand / wanted))
    requests, work = [], 0.0
    for request in long_enough.requests[::stride]:
        if work >= wanted:
            break
        requests.append(replace(request, arrival_s=work / _PRESSURE, service_class=STANDARD.name))
        work += model.of_request(request)
    saturated = replace(workload, requests=tuple(requests), duration_s=work / _PRESSURE)
    run = Driver(saturated, device, "fcfs", {STANDARD.name: STANDARD}, drain=False).run()
    done = sum(model.seconds(r.request.input_tokens, *r.window_progress) for r in run.records)
    per_s = done / run.window_s
    return Capacity(per_s, model, demand / workload.duration_s / per_s)


def at_load(workload: Workload, capacity: Capacity, load: float, seed: int) -> Workload:
    """Return the workload scaled to `load` times the capacity, over the same time and from the same tenants."""
    return multiply(workload, load / capacity.offered, capacity.model.of_request, seed)

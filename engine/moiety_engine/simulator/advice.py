"""Capacity advice for an operator: the load that one replica carries within every class's SLO, and its settings.

All figures come from simulated runs of the real scheduler; the module uses neither files nor the terminal.

Loads are multiples of the capacity C, the work that saturated FCFS completes. The saturation point is the largest load
at which every class attains its SLO for at least 99 % of its requests while work is started as fast as it arrives;
bisection finds it. Bounds, limits and the number of replicas are chosen for 0.8 of it and then verified together in one
more run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from moiety_engine.errors import InvalidConfig
from moiety_engine.simulator.bounds import REQUIRED_ATTAINMENT, ClassBounds, attainment, loosen, measure_bounds, tighten
from moiety_engine.simulator.capacity import Capacity, at_load, measure_capacity
from moiety_engine.simulator.devices import SimulatedDevice
from moiety_engine.simulator.driver import START_NS
from moiety_engine.simulator.simulate import SimulationOutcome, simulate
from moiety_wire.classes import OverloadAction, ServiceClass
from moiety_workload.request import TraceRequest, Workload
from moiety_workload.transforms import cut, last_for

SAFE_SHARE = 0.8  # of the saturation point: the load that is planned for
KV_LOW, KV_FULL = 0.7, 0.9
_FLOOR, _CEILING, _NUM_BISECTIONS = 0.1, 1.2, 6
_WAITING = 0.05  # share of the arriving work that may wait at the end: no backlog behind SLOs of hours
_NUM_LOOSENINGS = 5
_BETTER = 0.01  # goodput gain that another token budget must reach to be advised
_PREEMPTED_OFTEN = 0.1  # preemptions per request


@dataclass(frozen=True, slots=True)
class AdvisedLimits:
    """Batch limits to set, and the figures behind them.

    `longest_step_s`: step with a full token budget and full KV memory. `num_fitting`: requests of this mix that fit
    into the KV memory at once. `most_running`: requests in progress at once at the saturation point, preempted ones
    included. `running_tried`: another limit that was tried; None where there was no reason to.
    """

    max_batch_tokens: int
    max_running: int
    longest_step_s: float
    num_fitting: int
    most_running: int
    running_tried: int | None


@dataclass(frozen=True, slots=True)
class SloViolator:
    """Tenant and class with the most missed SLOs just beyond the saturation point, and their share of all misses."""

    tenant: str
    service_class: str
    share: float


@dataclass(frozen=True, slots=True)
class Advice:
    """Result of `Advisor.advise`.

    Loads are multiples of C: the trace's mean, its busiest part, and the saturation point. `never_attained`: classes
    that miss their SLO even at a tenth of C; the other figures use the loosened bounds in `classes` for them.
    """

    capacity_work_per_s: float
    offered_mean: float
    offered_peak: float
    window_s: float
    num_requests: int
    num_too_long: int
    saturation: float
    requests_per_s_at_saturation: float
    safe_load: float
    attained_at_safe_load: bool
    num_replicas: int
    limits: AdvisedLimits
    classes: tuple[ClassBounds, ...]
    never_attained: tuple[str, ...]
    kv_used_fraction: float
    decode_share: float
    preemptions_per_request: float
    breaker: SloViolator | None


class Advisor:
    """Runner of one workload at many loads on one device."""

    def __init__(
        self,
        workload: Workload,
        device: SimulatedDevice,
        classes: Iterable[ServiceClass],
        *,
        policy: str = "moiety",
        window_s: float = 300.0,
        seed: int = 0,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        """Raise InvalidConfig where no request fits the device or a class has no description."""
        fitting = tuple(r for r in workload.requests if r.input_tokens + r.output_tokens <= device.kv_tokens)
        if not fitting:
            raise InvalidConfig(
                f"no request of {workload.name} fits into the {device.kv_tokens:,} tokens of KV memory of "
                f"{device.name}: use a larger device"
            )
        self._num_too_long = len(workload.requests) - len(fitting)
        self._whole = replace(workload, requests=fitting)
        self._device = device
        known = {service.name: service for service in classes}
        used = sorted({request.service_class for request in fitting})
        if unknown := [name for name in used if name not in known]:
            raise InvalidConfig(f"the trace has requests of class {', '.join(unknown)}; known are {', '.join(known)}")
        self._configured = {name: known[name] for name in used}
        self._others = [service for name, service in known.items() if name not in self._configured]
        self._policy = policy
        self._seed = seed
        self._report_progress = on_progress or (lambda text: None)
        self._capacity = measure_capacity(self._whole, device)
        self._window = self._busiest(window_s)
        offered = self._capacity.model.offered_per_s(self._window) / self._capacity.work_per_s
        self._window_capacity = replace(self._capacity, offered=offered)

    def advise(self) -> Advice:
        """Return the advice after about a dozen runs. Raises InvalidConfig, WorkloadError, Stuck."""
        kept, never_attained = self._attainable_at_all()
        device = self._best_budget(kept)
        saturation, outcome, beyond = self._saturate(device, kept)
        limits = self._limits(device, kept, saturation, outcome)
        device = msgspec.structs.replace(device, max_running=limits.max_running)
        safe_load = SAFE_SHARE * saturation
        bounds, all_kept = self._bounds(device, kept, safe_load)
        capacity = self._capacity
        work_a_request = sum(map(capacity.model.of_request, self._whole.requests)) / len(self._whole.requests)
        peak = max(capacity.offered, self._window_capacity.offered)
        return Advice(
            capacity_work_per_s=capacity.work_per_s,
            offered_mean=capacity.offered,
            offered_peak=peak,
            window_s=self._window.duration_s,
            num_requests=len(self._whole.requests),
            num_too_long=self._num_too_long,
            saturation=saturation,
            requests_per_s_at_saturation=saturation * capacity.work_per_s / work_a_request,
            safe_load=safe_load,
            attained_at_safe_load=all_kept,
            num_replicas=max(1, math.ceil(peak / safe_load - 1e-9)),
            limits=limits,
            classes=bounds,
            never_attained=never_attained,
            kv_used_fraction=outcome.run.kv_used_fraction,
            decode_share=decode_share(self._whole.requests, capacity),
            preemptions_per_request=outcome.figures["preemptions"] / len(outcome.run.records),
            breaker=None if beyond is None else find_slo_violator(beyond),
        )

    def _busiest(self, window_s: float) -> Workload:
        """Return the window of `window_s` seconds in which the most work arrives; a shorter trace is repeated."""
        whole = self._whole
        if whole.duration_s <= window_s:
            return last_for(whole, window_s)
        work = [self._capacity.model.of_request(request) for request in whole.requests]
        best, best_s, start, running = 0.0, 0.0, 0, 0.0
        for request, amount in zip(whole.requests, work, strict=True):
            running += amount
            while whole.requests[start].arrival_s <= request.arrival_s - window_s:
                running -= work[start]
                start += 1
            if running > best:
                best, best_s = running, min(whole.requests[start].arrival_s, whole.duration_s - window_s)
        return cut(whole, best_s, window_s)

    def _run(self, device: SimulatedDevice, classes: dict[str, ServiceClass], load: float) -> SimulationOutcome:
        self._report_progress(f"{load:.2f} of the capacity, at most {device.max_batch_tokens} tokens a step")
        return simulate(
            at_load(self._window, self._window_capacity, load, self._seed),
            device,
            self._policy,
            classes=[*classes.values(), *self._others],
            capacity=self._capacity,
        )

    def _attainable_at_all(self) -> tuple[dict[str, ServiceClass], tuple[str, ...]]:
        """Return the classes and the names of those that had to be loosened.

        A class that misses its SLO on a nearly idle replica is loosened until it attains it.
        """
        classes = dict(self._configured)
        failed: dict[str, None] = {}
        for _ in range(_NUM_LOOSENINGS):
            patient = {
                name: msgspec.structs.replace(service, on_overload=OverloadAction.QUEUE)
                for name, service in classes.items()
            }
            run = self._run(self._device, patient, _FLOOR).run
            late = [name for name, kept in attainment(run).items() if kept < REQUIRED_ATTAINMENT]
            if not late:
                return classes, tuple(failed)
            failed.update(dict.fromkeys(late))
            classes |= {name: loosen(classes[name], run) for name in late}
        raise InvalidConfig(
            f"on {self._device.name} class {', '.join(failed)} attains no tested SLO at a tenth of the "
            "capacity: use a faster device, or a trace with more requests"
        )

    def _best_budget(self, classes: dict[str, ServiceClass]) -> SimulatedDevice:
        """Return the device with the token budget of the highest goodput at capacity; its own unless one is better."""
        own = self._device
        best = own
        best_good = self._run(own, classes, 1.0).figures["goodput_fraction_of_capacity"] * (1 + _BETTER)
        for budget in (own.max_batch_tokens // 2, own.max_batch_tokens * 2):
            if budget < 1:
                continue
            device = msgspec.structs.replace(own, max_batch_tokens=budget)
            good = self._run(device, classes, 1.0).figures["goodput_fraction_of_capacity"]
            if good > best_good:
                best, best_good = device, good
        return best

    def _saturate(
        self, device: SimulatedDevice, classes: dict[str, ServiceClass]
    ) -> tuple[float, SimulationOutcome, SimulationOutcome | None]:
        """Return the largest load at which every class attains its SLO, the run at it, and the nearest beyond it."""
        low, high = _FLOOR, _CEILING
        found: SimulationOutcome | None = None
        beyond: SimulationOutcome | None = None
        for _ in range(_NUM_BISECTIONS):
            load = (low + high) / 2
            outcome = self._run(device, classes, load)
            if min(attainment(outcome.run).values()) >= REQUIRED_ATTAINMENT and waiting_share(outcome) <= _WAITING:
                low, found = load, outcome
            else:
                high, beyond = load, outcome
        return low, found or self._run(device, classes, low), beyond

    def _limits(
        self, device: SimulatedDevice, classes: dict[str, ServiceClass], load: float, outcome: SimulationOutcome
    ) -> AdvisedLimits:
        """Advise a limit of running requests.

        The limit shrinks where requests are preempted for memory, and grows where memory is free and the limit was
        reached, if a run shows that nothing is lost by it; otherwise it stays.
        """
        requests = self._whole.requests
        steps = sum(request.output_tokens for request in requests)
        held = sum(r.output_tokens * (r.input_tokens + r.output_tokens / 2) for r in requests) / steps
        num_fitting = max(1, int(device.kv_tokens / held))
        most = most_running(outcome)
        used, figures = outcome.run.kv_used_fraction, outcome.figures
        tried = own = device.max_running
        if used > KV_FULL and figures["preemptions"] > _PREEMPTED_OFTEN * figures["num_requests"]:
            tried = min(own, num_fitting)
        elif used < KV_LOW and most >= own:
            tried = max(own, min(2 * own, num_fitting))
        advised = own
        if tried != own:
            other = self._run(msgspec.structs.replace(device, max_running=tried), classes, load)
            kept = min(attainment(other.run).values()) >= REQUIRED_ATTAINMENT
            advised = tried if kept and work_done(other) >= (1 - _BETTER) * work_done(outcome) else own
        budget = device.max_batch_tokens
        pairs = round(budget * sum(r.input_tokens for r in requests) / len(requests) / 2)
        longest_s = device.step_s(budget, min(advised, most), device.kv_tokens, pairs)
        return AdvisedLimits(budget, advised, longest_s, num_fitting, most, None if tried == own else tried)

    def _bounds(
        self, device: SimulatedDevice, kept: dict[str, ServiceClass], load: float
    ) -> tuple[tuple[ClassBounds, ...], bool]:
        """Return bounds with a margin over the measured figures, and whether another run attains all of them.

        A class that misses its tighter bounds gets its old bounds back.
        """
        run = self._run(device, kept, load).run
        tried = {name: tighten(service, run) for name, service in kept.items()}
        for _ in range(2):
            verified = self._run(device, tried, load).run
            shares = attainment(verified)
            late = [name for name, share in shares.items() if share < REQUIRED_ATTAINMENT]
            if not late:
                break
            tried |= {name: kept[name] for name in late}
        bounds = (measure_bounds(self._configured[name], service, verified) for name, service in tried.items())
        return tuple(sorted(bounds, key=lambda bound: self._configured[bound.name].rank)), not late


def decode_share(requests: Iterable[TraceRequest], capacity: Capacity) -> float:
    """Return the share of the demanded work that is decode work."""
    model = capacity.model
    total = prefill = 0.0
    for request in requests:
        total += model.of_request(request)
        prefill += model.seconds(request.input_tokens, request.input_tokens, 0)
    return 1 - prefill / total


def most_running(outcome: SimulationOutcome) -> int:
    """Return the largest number of requests in progress at one time."""
    changes = [(record.scheduled_ns, 1) for record in outcome.run.records if record.scheduled_ns]
    changes += [(record.end_ns, -1) for record in outcome.run.records if record.scheduled_ns and record.end_ns]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def find_slo_violator(outcome: SimulationOutcome) -> SloViolator | None:
    """Return the tenant and class with the most misses; None where all requests attained their SLO."""
    missed = Counter((r.request.tenant, r.request.service_class) for r in outcome.run.records if not r.attained)
    if not missed:
        return None
    (tenant, service_class), number = min(missed.items(), key=lambda item: (-item[1], item[0]))
    return SloViolator(tenant, service_class, number / missed.total())


def waiting_share(outcome: SimulationOutcome) -> float:
    """Return the share of the arrived work whose requests had not started when the window ended."""
    of_request = outcome.capacity.model.of_request
    end_ns = START_NS + outcome.run.window_s * 1e9
    records = outcome.run.records
    waiting = sum(of_request(r.request) for r in records if not 0 < r.scheduled_ns <= end_ns)
    return waiting / sum(of_request(r.request) for r in records)


def work_done(outcome: SimulationOutcome) -> float:
    """Return the device-seconds of work that were done when the last request arrived."""
    model = outcome.capacity.model
    return sum(model.seconds(r.request.input_tokens, *r.window_progress) for r in outcome.run.records)

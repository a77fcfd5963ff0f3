"""Benchmark behind `moiety bench scheduler`: the time of a decision when many requests run and very many wait.

The real scheduler and block pool run under virtual step times in a steady state: requests of four classes and many
tenants end and are replaced by others of the same class and tenant, so that every step has decisions to make and the
numbers of running and waiting requests stay as configured. Uses neither model nor tensors. CPU time is measured beside
the time, since it hardly depends on other load of the machine.

The decision is what the launch of a step waits for. The scheduler then records what the plan does not need any longer,
while a GPU computes the step; the benchmark measures that as well, and the sum.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.errors import InvalidConfig
from moiety_engine.messages import CoreSubmit
from moiety_engine.scheduling.admission.batching_strategies import STRATEGIES
from moiety_engine.scheduling.fairness.service_exchange import ServiceExchange
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.policies.registry import POLICIES, counts_tenant_service
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel
from moiety_huge_pages.process_memory import are_huge_pages_allowed, collapse_memory
from moiety_kernels.environment import describe_environment
from moiety_wire.classes import SHIPPED, OverloadAction, ServiceClass
from moiety_wire.engine_choices import Batching
from moiety_wire.fleet_service import ReplicaService
from moiety_wire.messages import Sampling

_BLOCK_SIZE = 16
_BLOCKS_A_ROW = 64  # pool blocks per running request: about two thirds of the pool is in use
_PREFILL_ROWS = 2048  # besides the decodes
_PROMPT_TOKENS = (64, 960)
_SYSTEM_TOKENS = 64  # shared by a tenant's prompts
_OUTPUT_TOKENS = (64, 448)
_VOCABULARY = 150_000
_EXPERTS = 48 * 128  # of all layers, one bit each
# Seconds of a step on an imaginary device: about 12 ms for 256 decodes, 10 µs per prompt token.
_DEVICE = (0.005, 0.001, 0.0, 0.0, 0.0003, 0.00005, 0.0)
_NOISE = 0.05
_WARM_UP_STEPS = 300
_CLASSES = tuple(msgspec.structs.replace(one, on_overload=OverloadAction.QUEUE) for one in SHIPPED)  # none is rejected
_GROWTH_AT = (100, 1_000, 10_000, 100_000)


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """Load under which scheduling decisions are measured."""

    policy: str = "moiety"
    running: int = 256
    waiting: int = 10_000
    tenants: int = 1_000
    everything: bool = False  # with all that decisions can consider in addition


@dataclass(slots=True)
class SchedulerTimes:
    """Measured times: one entry per step or per request."""

    decision_us: list[float] = field(default_factory=list)  # before the launch
    decision_cpu_us: list[float] = field(default_factory=list)
    after_launch_us: list[float] = field(default_factory=list)  # records of the launched step, and of cached blocks
    total_cpu_us: list[float] = field(default_factory=list)  # decision and after the launch
    commit_us: list[float] = field(default_factory=list)
    add_us: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    prefill_rows: list[int] = field(default_factory=list)
    num_ended: int = 0


class SteadyState:
    """A scheduler under a constant load. Owns the virtual clock."""

    def __init__(self, load: BenchLoad, *, seed: int) -> None:
        self.load = load
        self.times = SchedulerTimes()
        self._rng = random.Random(seed)
        self._device = StepTimeModel(_DEVICE)
        self._now_ns = 1_000_000_000_000
        self._num_made = 0
        self._text = self._rng.choices(range(_VOCABULARY), k=1 << 16)
        self._requesters: dict[int, tuple[ServiceClass, int]] = {}  # class and tenant by key, for replacements
        pool = BlockPool(load.running * _BLOCKS_A_ROW)
        host = HostTier(pool.num_blocks) if load.everything else None
        rows = load.running + _PREFILL_ROWS
        self.scheduler = Scheduler(
            KvLedger(pool, _BLOCK_SIZE, prefix_caching=True, host=host),
            SchedulerLimits(rows, load.running, max_waiting=1 << 30, batches_experts=load.everything),
            STRATEGIES[Batching.CONTINUOUS],
            load.policy,
        )
        self._fleet = _Fleet(self.scheduler, load) if load.everything else None
        self.add_some(load.running + load.waiting)

    def add_some(self, count: int) -> None:
        """Add requests of random classes and tenants."""
        for _ in range(count):
            self._add(self._rng.choice(_CLASSES), self._rng.randrange(self.load.tenants))

    def warm_up(self, steps: int = _WARM_UP_STEPS) -> None:
        """Step until the batch has been full and its requests are of mixed ages."""
        for _ in range(steps):
            self.step()
        self.times = SchedulerTimes()

    def step(self) -> None:
        """Plan, launch, advance the clock, commit, and replace the requests that ended."""
        scheduler = self.scheduler
        begin_ns, begin_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        plan = scheduler.plan(self._now_ns)
        planned_cpu_ns, planned_ns = time.thread_time_ns(), time.perf_counter_ns()
        self.times.decision_cpu_us.append((planned_cpu_ns - begin_cpu_ns) / 1e3)
        self._note(plan, (planned_ns - begin_ns) / 1e3)
        begin_ns, begin_launched_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        scheduler.launched(plan)
        if self._fleet is not None:
            self._fleet.take_changes(self._now_ns)
        end_cpu_ns = time.thread_time_ns()
        self.times.after_launch_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
        self.times.total_cpu_us.append((planned_cpu_ns - begin_cpu_ns + end_cpu_ns - begin_launched_cpu_ns) / 1e3)
        tokens = [1] * sum(chunk.samples for chunk in plan.chunks)
        seconds = self._device.predict_s(plan.shape) * self._rng.uniform(1 - _NOISE, 1 + _NOISE)
        self._now_ns += int(seconds * 1e9)
        begin_ns = time.perf_counter_ns()
        outputs = scheduler.commit(plan, tokens, [None] * len(tokens), self._now_ns)
        self.times.commit_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
        for output in outputs:
            if output.finish is not None:
                self.times.num_ended += 1
                self._add(*self._requesters.pop(output.key))
        scheduler.take_verdicts()
        if self._fleet is not None:
            for chunk in plan.chunks:
                chunk.sequence.experts.predicted = chunk.sequence.experts.predicted or self._rng.getrandbits(_EXPERTS)
            self._fleet.exchange(self._now_ns)

    def _note(self, plan: Plan, decision_us: float) -> None:
        times = self.times
        times.decision_us.append(decision_us)
        times.running.append(self.scheduler.num_running)
        times.waiting.append(self.scheduler.num_waiting)
        times.prefill_rows.append(plan.num_rows - plan.num_decode)

    def _add(self, service: ServiceClass, tenant: int) -> None:
        submit = self._make(service, tenant)
        begin_ns = time.perf_counter_ns()
        self.scheduler.add(submit, seed=0, now_ns=self._now_ns)
        self.times.add_us.append((time.perf_counter_ns() - begin_ns) / 1e3)

    def _make(self, service: ServiceClass, tenant: int) -> CoreSubmit:
        key = self._num_made
        self._num_made += 1
        self._requesters[key] = service, tenant
        rng, text = self._rng, self._text
        own = rng.randrange(len(text) - _PROMPT_TOKENS[1])
        common = tenant * 7 % (len(text) - _SYSTEM_TOKENS)
        length = rng.randint(*_PROMPT_TOKENS)
        num_output = rng.randint(*_OUTPUT_TOKENS)
        return CoreSubmit(
            key=key,
            tenant_id=f"tenant-{tenant}",
            service=service,
            prompt_ids=text[common : common + _SYSTEM_TOKENS] + text[own : own + length - _SYSTEM_TOKENS],
            sampling=Sampling(),
            max_tokens=num_output,
            min_tokens=0,
            stop_token_ids=[2],
            credit_tokens=num_output,
            cache_salt=b"%d" % tenant,
            arrival_unix_ns=self._now_ns,
        )


class _Fleet:
    """Another replica and a gateway, with which the scheduler exchanges what they need of it."""

    def __init__(self, scheduler: Scheduler, load: BenchLoad) -> None:
        self._changes = scheduler.groups.record_prefix_changes()
        self._exchange = None
        if counts_tenant_service(load.policy):
            self._exchange = scheduler.service_exchange = ServiceExchange(scheduler.policy, load.policy)

    def take_changes(self, now_ns: int) -> None:
        """Take the changes of the prefix cache, for a gateway."""
        if self._changes is not None:
            self._changes.take(now_ns)

    def exchange(self, now_ns: int) -> None:
        """Report the service here as that of another replica."""
        if self._exchange is not None and (report := self._exchange.take_report(now_ns / 1e9)) is not None:
            self._exchange.receive([ReplicaService("other", report)], now_ns / 1e9)


def measure_scheduler(load: BenchLoad, *, steps: int, seed: int, on_step: Callable[[], None]) -> dict[str, Any]:
    """Measure the load, and the growth with the number of waiting requests. Raises InvalidConfig."""
    if load.policy not in POLICIES:
        raise InvalidConfig(f"policy must be one of {', '.join(sorted(POLICIES))}, not {load.policy!r}")
    times = _measure(load, steps=steps, seed=seed, on_step=on_step)
    sizes = [size for size in _GROWTH_AT if size < load.waiting]
    growth = {
        str(size): _median(_measure(_with_waiting(load, size), steps=steps, seed=seed, on_step=on_step).decision_us)
        for size in sizes
    }
    growth[str(load.waiting)] = _median(times.decision_us)
    return {
        "environment": describe_environment() | {"device": "cpu", "threads": 1},
        "settings": {
            "policy": load.policy,
            "everything": load.everything,
            "steps": steps,
            "seed": seed,
            "block_size": _BLOCK_SIZE,
            "kv_blocks": load.running * _BLOCKS_A_ROW,
            "input_tokens_mean": sum(_PROMPT_TOKENS) / 2,
            "output_tokens_mean": sum(_OUTPUT_TOKENS) / 2,
        },
        "running": int(_median(times.running)),
        "waiting": min(times.waiting),
        "tenants": load.tenants,
        "decision_us": percentiles(times.decision_us),
        "decision_cpu_us": percentiles(times.decision_cpu_us),
        "after_launch_us": percentiles(times.after_launch_us),
        "total_us": percentiles([sum(pair) for pair in zip(times.decision_us, times.after_launch_us, strict=True)]),
        "total_cpu_us": percentiles(times.total_cpu_us),
        "commit_us": percentiles(times.commit_us),
        "add_us": percentiles(times.add_us),
        "prefill_tokens_per_step": sum(times.prefill_rows) / steps,
        "ended_per_step": times.num_ended / steps,
        "growth": growth,
        "bytes_per_waiting": measure_memory(load, seed=seed),
    }


def measure_memory(load: BenchLoad, *, seed: int) -> float:
    """Return the bytes that a waiting request takes besides the lists of its tokens."""
    state = SteadyState(replace(load, waiting=0), seed=seed)
    state.add_some(1)  # what the first one imports and caches is not counted
    gc.collect()
    tracemalloc.start()
    try:
        state.add_some(load.waiting)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    newest = list(state.scheduler.queues.waiting.values())[-load.waiting :]
    tokens = sum(sys.getsizeof(s.tokens) + sys.getsizeof(s.request.submit.prompt_ids) for s in newest)
    return (taken - tokens) / load.waiting


def percentiles(values: list[float]) -> dict[str, float] | None:
    """Return {p50, p90, p99}, or None where there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {f"p{p}": round(ordered[round(last * p / 100)], 1) for p in (50, 90, 99)}


def _measure(load: BenchLoad, *, steps: int, seed: int, on_step: Callable[[], None]) -> SchedulerTimes:
    with _collected_as_in_the_core():
        state = SteadyState(load, seed=seed)
        state.warm_up()
        gc.collect()
        gc.freeze()
        if are_huge_pages_allowed():
            with suppress(OSError):
                collapse_memory()
        gc.enable()
        for _ in range(steps):
            state.step()
            on_step()
        return state.times


@contextmanager
def _collected_as_in_the_core() -> Iterator[None]:
    """Disable garbage collection during construction. As in the core, what stays is frozen, and has huge pages."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        (gc.enable if was_enabled else gc.disable)()


def _with_waiting(load: BenchLoad, waiting: int) -> BenchLoad:
    return replace(load, waiting=waiting, tenants=min(load.tenants, max(1, waiting)))


def _median(values: list[float] | list[int]) -> float:
    return sorted(values)[len(values) // 2]

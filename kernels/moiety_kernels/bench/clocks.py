"""Timing of calls on a device: cold caches, interleaved repeats, medians; on a GPU without launch time.

Caches are flushed by *reading* other memory: written lines would still have to be written back while the call is timed.
On a GPU a call is captured as a CUDA graph where possible and queued behind a kernel that only waits, so that
everything is launched before the first event passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

Call = Callable[[], object]

MIN_REPEATS = 5
MAX_REPEATS = 40
_CACHE_MULTIPLE = 4  # multiple of the GPU's cache that is read, so that old contents are unlikely to remain
_CPU_CACHE_BYTES = 64 << 20  # as large as most caches
_WAIT_CYCLES_PER_S = 2e9  # clock rate of the waiting kernel; a slower clock waits longer, which is harmless
_LAUNCH_S = 100e-6  # upper bound on the time to launch a captured graph
_MAX_WAIT_S = 0.02


class CallFailed(Exception):
    """A call raised an exception; its time is unknown."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call: the median, and the interquartile range as a fraction of the median."""

    seconds: float
    spread: float
    repeats: int
    graph: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """A warm call. `launch_s`: seconds that the host needs to launch it."""

    call: Call
    graph: bool = False
    launch_s: float = 0.0


class Clock(Protocol):
    """Prepares calls, then times each once in turn."""

    def prepare(self, call: Call) -> Prepared:
        """Warm up `call`. Raises what the call raises."""

    def sample(self, calls: list[Prepared]) -> list[float]:
        """Return the seconds of each call, in order, each with cold caches."""


class CpuClock:
    """Clock of the host."""

    def __init__(self) -> None:
        self._other = torch.ones(_CPU_CACHE_BYTES // 4)

    def prepare(self, call: Call) -> Prepared:
        call()
        return Prepared(call)

    def sample(self, calls: list[Prepared]) -> list[float]:
        return [self._time(one.call) for one in calls]

    def _time(self, call: Call) -> float:
        self._other.sum()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin


class CudaClock:
    """Clock that uses the device's own events."""

    def __init__(self, device: torch.device) -> None:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.ones(_CACHE_MULTIPLE * cache_bytes // 4, device=device)
        self._sum = torch.empty((), device=device)

    def prepare(self, call: Call) -> Prepared:
        warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            call()
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:  # the call waits for the device, which a graph cannot capture
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            launch_s = time.perf_counter() - begin
            torch.cuda.synchronize()
            return Prepared(call, launch_s=launch_s)
        graph.replay()
        torch.cuda.synchronize()
        return Prepared(graph.replay, graph=True)

    def sample(self, calls: list[Prepared]) -> list[float]:
        marks = [(_event(), _event()) for _ in calls]
        for one, (begin, end) in zip(calls, marks, strict=True):
            torch.sum(self._other, dim=0, out=self._sum)
            wait_s = min(_MAX_WAIT_S, 1.5 * one.launch_s + _LAUNCH_S)
            torch.cuda._sleep(int(wait_s * _WAIT_CYCLES_PER_S))  # type: ignore[no-untyped-call]
            begin.record()
            one.call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def measure(
    calls: Mapping[str, Call], clock: Clock, *, budget_s: float
) -> tuple[dict[str, Timing], dict[str, CallFailed]]:
    """Time `calls` in turn, in an order that is reversed every other round, for about `budget_s`.

    Calls that fail are returned with their errors and take no time from the others.
    """
    ready: dict[str, Prepared] = {}
    failed: dict[str, CallFailed] = {}
    for name, call in calls.items():
        try:
            ready[name] = clock.prepare(call)
        except Exception as exc:  # a rival's code may raise anything
            failed[name] = CallFailed(f"{type(exc).__name__}: {exc}"[:300])
    names = list(ready)
    if not names:
        return {}, failed
    seen: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    for number in range(MAX_REPEATS):
        order = names if number % 2 == 0 else names[::-1]
        for name, seconds in zip(order, clock.sample([ready[name] for name in order]), strict=True):
            seen[name].append(seconds)
        spent = time.perf_counter() - begin
        if number + 1 >= MIN_REPEATS and spent * (number + 2) / (number + 1) > budget_s:
            break
    return {name: _timing(seen[name], ready[name].graph) for name in names}, failed


def _timing(seconds: list[float], graph: bool) -> Timing:
    ordered, middle = sorted(seconds), median(seconds)
    quarter = len(ordered) // 4
    return Timing(middle, (ordered[-1 - quarter] - ordered[quarter]) / middle, len(ordered), graph)

"""Pool of devices whose number changes while it serves, as under an autoscaler.

A requested device takes requests after the start time. A removed device takes no new requests and leaves when its last
request has ended. A request goes to the ready device with the fewest open requests, the earliest among equals; without
a ready device it is lost. Each device is the real scheduler under virtual time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from moiety_engine.simulator.driver import START_NS, DeviceTerms, Driver
from moiety_engine.simulator.records import Record
from moiety_workload.request import TraceRequest, Workload

_POLL_NS = 1_000_000  # time until a scheduler that holds its requests back is polled again


@dataclass(frozen=True, slots=True)
class PoolTerms(DeviceTerms):
    """Devices of a pool, and the seconds from requesting a device until it takes requests."""

    start_s: float


class PoolDevice(Driver):
    """One device, advanced in increments. `ended` collects the records of ended requests."""

    def __init__(self, workload: Workload, terms: PoolTerms, max_tokens: int, ready_s: float) -> None:
        empty = replace(workload, requests=())
        super().__init__(empty, terms.device, terms.policy, terms.classes, max_tokens=max_tokens)
        self.ready_s = ready_s
        self.leaving = False
        self.ended: list[Record] = []
        self._inbox: deque[TraceRequest] = deque()
        self._now_ns = START_NS + round(ready_s * 1e9)

    @property
    def num_open(self) -> int:
        """Number of requests given to the device that have not ended."""
        return self._num_open + len(self._inbox)

    def submit(self, request: TraceRequest) -> None:
        """Queue a request; it starts with the first step after its arrival."""
        self._inbox.append(request)

    def advance(self, until_s: float) -> None:
        """Run all steps that begin before `until_s`."""
        until_ns = START_NS + round(until_s * 1e9)
        while self._now_ns < until_ns:
            while self._inbox and START_NS + self._inbox[0].arrival_s * 1e9 <= self._now_ns:
                self._submit(self._inbox.popleft(), self._now_ns)
            if not self._num_open:
                arrival_ns = START_NS + round(self._inbox[0].arrival_s * 1e9) if self._inbox else until_ns
                self._now_ns = max(self._now_ns + 1, min(arrival_ns, until_ns))
                continue
            plan = self._scheduler.plan(self._now_ns)
            self._take_failures(self._now_ns)
            if not plan.chunks:
                self._now_ns += _POLL_NS
                continue
            end_ns = self._now_ns + max(1, round(self._cost_s(plan, self._now_ns) * 1e9))
            self._step(plan, self._now_ns, end_ns)
            self._now_ns = end_ns

    def _close(self, record: Record, now_ns: int) -> None:
        super()._close(record, now_ns)
        self.ended.append(record)


class Pool:
    """Devices in the order of their request; the newest is removed first, as in a StatefulSet."""

    def __init__(self, workload: Workload, terms: PoolTerms, count: int) -> None:
        self._workload = workload
        self._terms = terms
        self._max_tokens = max(request.output_tokens for request in workload.requests)
        self._waiting = deque(workload.requests)
        self._devices = [self._new(0.0) for _ in range(count)]
        self._leaving: list[PoolDevice] = []
        self.num_lost = 0
        self.device_s = 0.0  # device-seconds held, including starts and drains
        self.now_s = 0.0

    @property
    def size(self) -> int:
        """Number of devices that are wanted, ready or not."""
        return len(self._devices)

    @property
    def num_ready(self) -> int:
        return sum(one.ready_s <= self.now_s for one in self._devices)

    @property
    def num_open(self) -> int:
        return sum(one.num_open for one in (*self._devices, *self._leaving))

    @property
    def is_done(self) -> bool:
        """Return whether all requests have arrived and ended."""
        return not self._waiting and not self.num_open

    def resize(self, count: int) -> None:
        """Request more devices or remove some."""
        while len(self._devices) < count:
            self._devices.append(self._new(self.now_s + self._terms.start_s))
        while len(self._devices) > count:
            self._leaving.append(self._devices.pop())

    def advance(self, until_s: float) -> list[Record]:
        """Advance arrivals and devices to `until_s`; return the records of requests that ended meanwhile."""
        while self._waiting and self._waiting[0].arrival_s < until_s:
            request = self._waiting.popleft()
            self._run(request.arrival_s)
            ready = [one for one in self._devices if one.ready_s <= request.arrival_s]
            if ready:
                min(ready, key=lambda one: one.num_open).submit(request)
            else:
                self.num_lost += 1
        self._run(until_s)
        self.device_s += (until_s - self.now_s) * (len(self._devices) + len(self._leaving))
        self.now_s = until_s
        ended = [record for one in (*self._devices, *self._leaving) for record in one.ended]
        for one in (*self._devices, *self._leaving):
            one.ended.clear()
        self._leaving = [one for one in self._leaving if one.num_open]
        return ended

    def _run(self, until_s: float) -> None:
        for one in (*self._devices, *self._leaving):
            one.advance(until_s)

    def _new(self, ready_s: float) -> PoolDevice:
        return PoolDevice(self._workload, self._terms, self._max_tokens, ready_s)

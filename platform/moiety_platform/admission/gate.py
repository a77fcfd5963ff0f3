"""Bounds of admission at this gateway, before a request reaches an engine.

Each tenant has a bound on its sequences in flight, each key one on its open streams, and a class that is overloaded
refuses requests that would certainly miss their SLO. Tenants take turns on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from moiety_platform.clock import Clock
from moiety_platform.errors import Overloaded, RateLimited
from moiety_wire.classes import OverloadAction, ServiceClass
from moiety_wire.engine_load import ClassLoad
from moiety_wire.trace_events import Reason

MAX_BEGUN = 4  # per iteration: each takes up to 0.5 ms; a lower bound limits the requests per second
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
STREAM_RETRY_AFTER_S = 1.0
UNATTAINABLE_MARGIN = 2.0  # times the class's longest wait, above which a request is refused
MAX_CLASS_RETRY_S = 3600.0
MEMORY = 0.9  # weight of the previous mean at each new gap


@dataclass(slots=True)
class _Tenant:
    num_inflight: int = 0
    last_end_s: float | None = None
    gap_s: float | None = None  # mean time between the ends of two sequences


class AdmissionGate:
    """Counter of sequences (prompts × n) in flight, each of which is one request to an engine. For one event loop."""

    def __init__(self, max_inflight_per_tenant: int, clock: Clock) -> None:
        self.limit = max_inflight_per_tenant  # can be changed, for requests admitted from then on
        self.clock = clock
        self._tenants: dict[str, _Tenant] = {}

    def reserve(self, tenant_id: str, num_sequences: int) -> AdmissionSlot:
        """Count a request as in flight until its place is released. Raises Overloaded above the tenant's bound.

        A request larger than the bound is admitted when the tenant has nothing else in flight.
        """
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        if tenant.num_inflight and tenant.num_inflight + num_sequences > self.limit:
            raise Overloaded(
                f"{tenant.num_inflight} sequences of this tenant are in flight, and {self.limit} are allowed; wait "
                "for some to end, then try again",
                Reason.TENANT_QUEUE_FULL,
                retry_after_s=_retry_after_s(tenant, tenant.num_inflight + num_sequences - self.limit),
            )
        tenant.num_inflight += num_sequences
        return AdmissionSlot(self, tenant_id, tenant, num_sequences)

    def num_inflight(self, tenant_id: str) -> int:
        """Return the number of the tenant's sequences in flight."""
        tenant = self._tenants.get(tenant_id)
        return 0 if tenant is None else tenant.num_inflight

    def forget(self, tenant_id: str) -> None:
        """Forget a tenant without sequences in flight."""
        del self._tenants[tenant_id]


class AdmissionSlot:
    """Count of one request's sequences in flight. Release it exactly once."""

    __slots__ = ("_gate", "_num_sequences", "_tenant", "_tenant_id")

    def __init__(self, gate: AdmissionGate, tenant_id: str, tenant: _Tenant, num_sequences: int) -> None:
        self._gate, self._tenant_id, self._tenant, self._num_sequences = gate, tenant_id, tenant, num_sequences

    def release(self) -> None:
        """Release the place at the end of the request."""
        tenant, num_sequences = self._tenant, self._num_sequences
        tenant.num_inflight -= num_sequences
        if not tenant.num_inflight:
            self._gate.forget(self._tenant_id)
            return
        now_s = self._gate.clock.monotonic()
        if tenant.last_end_s is not None:
            gap_s = (now_s - tenant.last_end_s) / num_sequences
            tenant.gap_s = gap_s if tenant.gap_s is None else MEMORY * tenant.gap_s + (1 - MEMORY) * gap_s
        tenant.last_end_s = now_s


def _retry_after_s(tenant: _Tenant, num_too_many: int) -> float:
    """Return the seconds until `num_too_many` of the tenant's sequences will have ended, at the recent rate of ends."""
    wait_s = MIN_RETRY_S if tenant.gap_s is None else num_too_many * tenant.gap_s
    return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)


class OpenCounts:
    """Numbers of open requests or streams by tenant or other holder. For one event loop."""

    def __init__(self) -> None:
        self._num_open: Counter[str] = Counter()

    def total(self) -> int:
        """Return the number of all holders together."""
        return self._num_open.total()

    @contextmanager
    def counted(self, holder_id: str, limit: int, refusal: Callable[[], RateLimited]) -> Iterator[None]:
        """Count one of the holder as open. Raises the refusal where it has `limit` of them."""
        if self._num_open[holder_id] >= limit:
            raise refusal()
        self._num_open[holder_id] += 1
        try:
            yield
        finally:
            self._num_open[holder_id] -= 1
            if not self._num_open[holder_id]:
                del self._num_open[holder_id]


class StreamGate(OpenCounts):
    """Counter of streamed responses, from the body of their request to their end. For one event loop.

    Each key, or each of other holders, has the limit.
    """

    def __init__(self, limit: int, holder: str = "key", streams: str = "streams") -> None:
        super().__init__()
        self.limit = limit  # can be changed, for streams that begin from then on
        self._what = holder, streams  # as errors name them

    def hold(self, holder_id: str) -> AbstractContextManager[None]:
        """Count a stream as open. Raises RateLimited where the holder is at its limit."""
        return self.counted(holder_id, self.limit, self._refusal)

    def _refusal(self) -> RateLimited:
        holder, streams = self._what
        return RateLimited(
            f"This {holder} has {self.limit} {streams} open at this gateway, and no more are allowed; read some to "
            "their end or close them, then try again",
            code="too_many_streams",
            retry_after_s=STREAM_RETRY_AFTER_S,
        )


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    """Reason for a refusal, and the time after which a retry makes sense."""

    reason: Reason
    retry_after_s: float
    message: str


def is_unattainable(service: ServiceClass, load: ClassLoad) -> bool:
    """Return whether an engine with that load answers requests of the class far too late."""
    is_late = load.predicted_ttft_s > UNATTAINABLE_MARGIN * service.max_queue_s
    return is_late and service.on_overload is OverloadAction.REJECT


def refuse_unattainable(service: ServiceClass, load: ClassLoad | None) -> AdmissionRefusal | None:
    """Return a refusal, or None to send the request to the engine.

    `load` is None where no recent report on the class is known.
    """
    if load is None or not is_unattainable(service, load):
        return None
    retry_after_s = min(max(load.predicted_ttft_s - service.max_queue_s, MIN_RETRY_S), MAX_CLASS_RETRY_S)
    message = (
        f"the class {service.name!r} is overloaded: the first token would take about {load.predicted_ttft_s:.0f} s, "
        f"and the longest wait is to be {service.max_queue_s:g} s; try again in {retry_after_s:.0f} s, or ask for a "
        "lower service_tier"
    )
    return AdmissionRefusal(Reason.PREDICTED_LATE, retry_after_s, message)


class TenantRoundRobin:
    """Round-robin of tenants over an event loop, so that no tenant delays the requests and streams of others.

    Decoding a request's body and counting its tokens block the event loop, for longer the more text there is. In order
    of arrival, a tenant that sends hundreds of requests at once would delay everybody else until its last request is
    done. Instead each iteration of the event loop begins a few requests, one per tenant in turn; sockets are served
    between two iterations.

    A request with fewer than `MAX_BEGUN` before it in the same iteration continues at once.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, in the order of their turns
        self._num_begun = 0  # in this iteration

    async def wait(self, tenant_id: str) -> None:
        """Wait for the tenant's turn. The requests of one tenant keep the order of their calls."""
        if self._num_begun < MAX_BEGUN and not self._waiting:
            self._begin()
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(future)
        await future

    def _begin(self) -> None:
        if self._num_begun == 0:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        self._num_begun += 1

    def _next_iteration(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < MAX_BEGUN:
            tenant_id = next(iter(self._waiting))
            futures = self._waiting.pop(tenant_id)
            future = futures.popleft()
            if futures:
                self._waiting[tenant_id] = futures  # behind all other tenants
            if not future.done():  # otherwise its client has disconnected
                future.set_result(None)
                self._begin()

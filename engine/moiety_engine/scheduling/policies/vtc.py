"""Virtual token counter: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with its weights.

A tenant's counter grows by the uncached prompt tokens of its requests when they start, and by two for each output token
when it is generated, divided by the tenant's weight. The tenant with the lowest counter starts its oldest request next.
A tenant that had no queued requests and gets one is lifted to the lowest counter of the tenants that have some; if
there are none, to that of the tenant whose request was the last to leave the queue. Started requests are not
interrupted, and continue before others start. The policy ignores classes and deadlines.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

from moiety_engine.scheduling.fairness.service_counter import ServiceCounter
from moiety_engine.scheduling.fairness.tenant_counters import OUTPUT_WEIGHT
from moiety_engine.scheduling.policies.baseline_policies import OrderedPolicy
from moiety_engine.scheduling.policies.policy_interface import PolicyContext, vtc_bound
from moiety_engine.scheduling.queues.entry_heap import EntryHeap
from moiety_engine.sequence import Sequence, SequenceState

_MAX_IDLE = 1024  # remembered tenants above which idle ones are dropped


class VtcTenant(ServiceCounter):
    """Counter of one tenant, and its queued requests by arrival."""

    __slots__ = ("active", "heap", "num_queued")

    def __init__(self) -> None:
        super().__init__()
        self.active = 0  # requests that have not ended
        self.num_queued = 0  # requests that have entered the queue and have not started
        self.heap = EntryHeap()


class Vtc(OrderedPolicy):
    """Policy ordered by counter, then by arrival; started requests come first."""

    counts_tenant_service = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)  # its heap holds the started sequences
        self._clients: dict[str, VtcTenant] = {}
        self._counted: set[Sequence] = set()  # those that their tenants count as queued
        self._by_counter: list[
            tuple[float, int, VtcTenant]
        ] = []  # one entry per client with a heap; the counter may have grown
        self._left_last: VtcTenant | None = None
        self._ties = 0
        self._forget_at = _MAX_IDLE

    # ── prefill queue ──

    def push(self, sequence: Sequence, now_s: float) -> None:
        if sequence.state is not SequenceState.WAITING:
            super().push(sequence, now_s)
            return
        client = self._clients[sequence.request.tenant]
        if sequence not in self._counted:
            self._counted.add(sequence)
            if client.num_queued == 0:
                self._lift(client)
            client.num_queued += 1
        self._num_queued += sequence.enter_queue()
        if not client.heap:
            self._ties += 1
            heappush(self._by_counter, (client.counter, self._ties, client))
        client.heap.push(sequence.request.order, sequence)

    def pop(self, now_s: float) -> Sequence | None:
        sequence = super().pop(now_s)
        if sequence is None and (client := self._lowest()) is not None and (sequence := client.heap.pop()) is not None:
            self._num_queued -= sequence.leave_queue()
        return sequence

    def _lowest(self) -> VtcTenant | None:
        """Return the client with the lowest counter, of those that have a request to start."""
        order = self._by_counter
        while order:
            counter, tie, client = order[0]
            if client.heap.first() is None:
                heappop(order)
            elif counter < client.counter:
                heapreplace(order, (client.counter, tie, client))
            else:
                return client
        return None

    def _lift(self, client: VtcTenant) -> None:
        lowest = self._lowest() or self._left_last
        if lowest is not None:
            client.raise_counter(lowest.counter)

    # ── events ──

    def arrived(self, sequence: Sequence, now_s: float) -> None:
        client = self._clients.get(sequence.request.tenant)
        if client is None:
            if len(self._clients) >= self._forget_at:
                self._forget_idle()
            client = self._clients[sequence.request.tenant] = VtcTenant()
        client.weight = max(1e-6, sequence.request.submit.tenant_weight)
        client.active += 1

    def started(self, sequence: Sequence, num_uncached: int, now_s: float) -> None:
        client = self._clients[sequence.request.tenant]
        if self.served_tenants is not None:
            self.served_tenants.track(client, 0, sequence.request.tenant)
        client.counter += num_uncached / client.weight
        self._stop_waiting(client, sequence)

    def decoded(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            client = self._clients[sequence.request.tenant]
            client.counter += OUTPUT_WEIGHT / client.weight

    def ended(self, sequence: Sequence, now_s: float) -> None:
        client = self._clients[sequence.request.tenant]
        client.active -= 1
        if sequence in self._counted:
            self._stop_waiting(client, sequence)

    def add_remote_service(self, rank: int, tenant: str, service: float, slack: float) -> None:
        lowest = self._lowest() or self._left_last
        floor = 0.0 if lowest is None else lowest.counter
        client = self._clients.get(tenant)
        if client is None:
            if len(self._clients) >= self._forget_at:
                self._forget_idle()
            client = self._clients[tenant] = VtcTenant()
            client.raise_counter(floor)
        client.raise_counter(min(client.counter, floor + vtc_bound(self.context) + slack) + service)

    def _stop_waiting(self, client: VtcTenant, sequence: Sequence) -> None:
        """Record that one of the client's requests is no longer queued."""
        self._counted.remove(sequence)
        client.num_queued -= 1
        if client.num_queued == 0:
            self._left_last = client

    def _forget_idle(self) -> None:
        """Drop idle clients whose counter is not above the value to which they would be lifted."""
        lowest = self._lowest() or self._left_last
        if lowest is not None:
            floor = lowest.counter
            self._clients = {name: c for name, c in self._clients.items() if c.active or c.counter > floor}
        self._forget_at = max(_MAX_IDLE, 2 * len(self._clients))

"""The virtual token counter: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with its weights.

A tenant's counter grows by the prompt tokens of its requests when they start (those that no cache held) and by two for
each output token when it is made, over the tenant's weight. The tenant with the lowest counter starts its oldest
request next. A tenant that had nothing queued and comes back is lifted to the lowest counter of those that have; if
nobody has, to that of the tenant whose request was the last to leave the queue. What has started is not interrupted,
and goes on before others start. Classes and deadlines mean nothing here.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

from moiety_engine.scheduling.entry_heap import EntryHeap
from moiety_engine.scheduling.policies.tenant_counters import OUTPUT_WEIGHT
from moiety_engine.scheduling.policy import Policy, PolicyContext
from moiety_engine.sequence import Sequence, SequenceState

_NEW, _QUEUED = range(2)  # a sequence's `bucket`: whether its client counts it as queued
_MAX_IDLE = 1024  # clients remembered beyond those that have requests, before it is seen who can be forgotten


class VtcTenant:
    """One tenant: its counter, and by arrival what it has queued."""

    __slots__ = ("active", "counter", "heap", "num_queued", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.counter = 0.0
        self.active = 0  # requests that have not ended
        self.num_queued = 0  # of them, those that have entered the queue and have not started
        self.heap = EntryHeap()


class Vtc(Policy):
    """By counter, then by arrival; what has started comes before all that has not."""

    name = "vtc"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)  # its heap holds those that have started
        self._clients: dict[str, VtcTenant] = {}
        self._by_counter: list[
            tuple[float, int, VtcTenant]
        ] = []  # one for each with a heap; the counter may have grown
        self._left_last: VtcTenant | None = None
        self._ties = 0
        self._forget_at = _MAX_IDLE

    # ── the queue ──

    def key(self, sequence: Sequence, now_s: float) -> int:
        return sequence.order

    def push(self, sequence: Sequence, now_s: float) -> None:
        if sequence.place is not SequenceState.WAITING:
            super().push(sequence, now_s)
            return
        client: VtcTenant = sequence.account
        if sequence.bucket == _NEW:
            sequence.bucket = _QUEUED
            if client.num_queued == 0:
                self._lift(client)
            client.num_queued += 1
        self._num_queued += sequence.enter_queue()
        if not client.heap:
            self._ties += 1
            heappush(self._by_counter, (client.counter, self._ties, client))
        client.heap.push(sequence.order, sequence)

    def pop(self, now_s: float) -> Sequence | None:
        sequence = super().pop(now_s)
        if sequence is None and (client := self._lowest()) is not None and (sequence := client.heap.pop()) is not None:
            self._num_queued -= sequence.leave_queue()
        return sequence

    def _lowest(self) -> VtcTenant | None:
        """Of the clients that have something to start, the one with the lowest counter."""
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
            client.counter = max(client.counter, lowest.counter)

    # ── what happened ──

    def arrived(self, sequence: Sequence, now_s: float) -> None:
        client = self._clients.get(sequence.tenant)
        if client is None:
            if len(self._clients) >= self._forget_at:
                self._forget_idle()
            client = self._clients[sequence.tenant] = VtcTenant()
        client.weight = max(1e-6, sequence.submit.tenant_weight)
        client.active += 1
        sequence.account = client

    def started(self, sequence: Sequence, num_uncached: int, now_s: float) -> None:
        client: VtcTenant = sequence.account
        client.counter += num_uncached / client.weight
        self._left(client)

    def decoded(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            client: VtcTenant = sequence.account
            client.counter += OUTPUT_WEIGHT / client.weight

    def ended(self, sequence: Sequence, now_s: float) -> None:
        client: VtcTenant = sequence.account
        client.active -= 1
        if sequence.place is SequenceState.WAITING and sequence.bucket == _QUEUED:
            self._left(client)

    def _left(self, client: VtcTenant) -> None:
        """One of the client's requests is queued no longer."""
        client.num_queued -= 1
        if client.num_queued == 0:
            self._left_last = client

    def _forget_idle(self) -> None:
        """A client whose counter is not above what it would be lifted to is as good as new."""
        lowest = self._lowest() or self._left_last
        if lowest is not None:
            floor = lowest.counter
            self._clients = {name: c for name, c in self._clients.items() if c.active or c.counter > floor}
        self._forget_at = max(_MAX_IDLE, 2 * len(self._clients))

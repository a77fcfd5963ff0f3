"""Deficit longest prefix match: "Locality-aware Fair Scheduling in LLM Serving" (arXiv 2501.14312), for one replica.

Requests start in order of the longest cached prefix, as long as their tenant has deficit left. The uncached prompt
tokens of a request at its start, and every output token times its weight, are subtracted from its tenant's deficit,
which may become negative. When no waiting tenant has any deficit left, each gets quanta of its weight times `quantum`
tokens, until one has. A tenant without waiting requests gets none. Started requests continue before others start. The
quantum is a free choice, here the tokens of a step; a larger one favours locality, a smaller one fairness.

The paper sorts the queue before each batch. Here, each tenant has a heap ordered by the last known prefix length. The
prefix is searched again when a request reaches the top, since blocks may have been evicted, and when a block that it
lacked has been computed.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

from moiety_engine.scheduling.fairness.tenant_counters import OUTPUT_WEIGHT
from moiety_engine.scheduling.policies.baseline_policies import OrderedPolicy
from moiety_engine.scheduling.policies.policy_interface import PolicyContext, vtc_bound
from moiety_engine.scheduling.queues.entry_heap import EntryHeap
from moiety_engine.sequence import Sequence, SequenceState

_MAX_IDLE = 1024  # idle tenants that are remembered


class DlpmTenant:
    """Scheduling state of one tenant."""

    __slots__ = ("active", "deficit", "granted", "heap", "num_waiting", "version", "weight")

    def __init__(self) -> None:
        self.weight = 1.0
        self.deficit = 0.0
        self.granted = 0.0  # deficit that it was given, less the service on other replicas
        self.active = 0  # requests that have not ended
        self.num_waiting = 0  # requests that have entered the queue and have not started
        self.heap = EntryHeap()  # by minus the cached tokens
        self.version = 0  # incremented when its position in the order changes

    @property
    def own_service(self) -> float:
        """Service of this replica in tokens; the weight is in the quanta."""
        return self.granted - self.deficit


class Dlpm(OrderedPolicy):
    """Policy ordered by cached prefix, among tenants with deficit left; started requests come first."""

    counts_tenant_service = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)  # its heap holds the started sequences
        self.quantum = context.max_batch_tokens
        self._clients: dict[str, DlpmTenant] = {}
        self._counted: set[Sequence] = set()  # those that their tenants count as waiting
        self._waiting: dict[int, DlpmTenant] = {}  # by id, those with requests that wait to start
        self._order: list[
            tuple[int, int, int, int, DlpmTenant]
        ] = []  # (first key and order of a heap, tie, version, client)
        self._waiting_for: dict[bytes, dict[int, Sequence]] = {}  # by the hash of the first block that the cache lacked
        self._lacks: dict[int, bytes] = {}  # by sequence key, the same hash
        self._ties = 0
        self._forget_at = 2 * _MAX_IDLE

    # ── prefill queue ──

    def push(self, sequence: Sequence, now_s: float) -> None:
        if sequence.state is not SequenceState.WAITING:
            super().push(sequence, now_s)
            return
        client = self._clients[sequence.request.tenant]
        if sequence not in self._counted:
            self._counted.add(sequence)
            client.num_waiting += 1
            self._waiting[id(client)] = client
        self._num_queued += sequence.enter_queue()
        self._enqueue(sequence)

    def pop(self, now_s: float) -> Sequence | None:
        sequence = super().pop(now_s)
        if sequence is None and (sequence := self._best()) is not None:
            self._forget_shortage(sequence)
            self._num_queued -= sequence.leave_queue()
        return sequence

    def discard(self, sequence: Sequence) -> None:
        if sequence.state is not SequenceState.WAITING:
            super().discard(sequence)
        else:
            self._forget_shortage(sequence)
            self._num_queued -= sequence.leave_queue()

    def _enqueue(self, sequence: Sequence) -> None:
        """Push the sequence to its tenant's heap, keyed by the prefix that the cache now holds."""
        cached = self.context.cached_tokens(sequence)
        self._note_shortage(sequence, cached)
        client = self._clients[sequence.request.tenant]
        client.heap.push(-cached, sequence)
        first = client.heap.first()
        if first is not None and first[3] is sequence:
            self._place(client)

    def _place(self, client: DlpmTenant) -> None:
        """Enter a tenant anew in the order, after its first request or its deficit changed."""
        client.version += 1
        first = client.heap.first()
        if first is not None and client.deficit > 0:
            self._ties += 1
            heappush(self._order, (*first[:2], self._ties, client.version, client))

    def _best(self) -> Sequence | None:
        """Remove and return the request with the longest prefix, of the tenants with deficit left.

        Return None also if these tenants have only requests that were taken in this step and could not join.
        """
        while True:
            while self._order:
                key, order, tie, version, client = self._order[0]
                first = client.heap.first()
                if version != client.version or client.deficit <= 0 or first is None:
                    heappop(self._order)
                elif (key, order) != first[:2]:
                    heapreplace(self._order, (*first[:2], tie, version, client))
                elif (cached := self.context.cached_tokens(first[3])) < -key:
                    self._note_shortage(first[3], cached)
                    client.heap.rekey_first(-cached)
                else:
                    return client.heap.pop()
            if not self._refill():
                return None

    def _refill(self) -> bool:
        """Give each waiting tenant as many quanta as it takes for one of them to have deficit left.

        Return False if no tenant waits or one has deficit left.
        """
        clients = self._waiting.values()
        if not clients or any(client.deficit > 0 for client in clients):
            return False
        rounds = min(int(-c.deficit / (self.quantum * c.weight)) + 1 for c in clients)
        for client in clients:
            granted = rounds * self.quantum * client.weight
            client.deficit += granted
            client.granted += granted
            self._place(client)
        return True

    # ── prefixes ──

    def _note_shortage(self, sequence: Sequence, num_cached: int) -> None:
        """Record the next block that would extend the cached prefix, if it can be shared."""
        self._forget_shortage(sequence)
        size = self.context.layout.block_size
        if num_cached + size < len(sequence.tokens):
            lacked = sequence.block_hashes.at(num_cached // size, size)
            self._lacks[sequence.key] = lacked
            self._waiting_for.setdefault(lacked, {})[sequence.key] = sequence

    def _forget_shortage(self, sequence: Sequence) -> None:
        lacked = self._lacks.pop(sequence.key, None)
        if lacked is not None:
            others = self._waiting_for[lacked]
            del others[sequence.key]
            if not others:
                del self._waiting_for[lacked]

    def _published(self, sequence: Sequence) -> None:
        """Reorder the requests that lacked one of the sequence's blocks, which can be hit now."""
        for index in range(sequence.kv.num_sealed):
            for other in list(
                self._waiting_for.get(sequence.block_hashes.at(index, self.context.layout.block_size), {}).values()
            ):
                other.entry += 2  # its old entry is void
                self._enqueue(other)

    # ── events ──

    def arrived(self, sequence: Sequence, now_s: float) -> None:
        client = self._clients.pop(sequence.request.tenant, None) or DlpmTenant()
        self._clients[sequence.request.tenant] = client  # moved to the end: most recent arrival last
        if len(self._clients) > self._forget_at:
            self._forget_idle()
        client.weight = max(1e-6, sequence.request.submit.tenant_weight)
        client.active += 1

    def started(self, sequence: Sequence, num_uncached: int, now_s: float) -> None:
        client = self._clients[sequence.request.tenant]
        if self.served_tenants is not None:
            self.served_tenants.track(client, 0, sequence.request.tenant)
        client.deficit -= num_uncached
        self._stop_waiting(client, sequence)

    def decoded(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._clients[sequence.request.tenant].deficit -= OUTPUT_WEIGHT
            if sequence.num_output == sequence.request.num_resumed + 1 and self._waiting_for:
                self._published(sequence)

    def ended(self, sequence: Sequence, now_s: float) -> None:
        client = self._clients[sequence.request.tenant]
        client.active -= 1
        if sequence.state is SequenceState.WAITING:
            if sequence in self._counted:
                self._stop_waiting(client, sequence)
        elif self._waiting_for:
            self._published(sequence)

    def add_remote_service(self, rank: int, tenant: str, service: float, slack: float) -> None:
        client = self._clients.get(tenant)
        if client is None:
            client = self._clients[tenant] = DlpmTenant()
            if len(self._clients) > self._forget_at:
                self._forget_idle()
        least = -(vtc_bound(self.context) + slack) * client.weight
        before = client.deficit
        client.deficit = min(before, max(before, least) - service)
        client.granted += client.deficit - before

    def _stop_waiting(self, client: DlpmTenant, sequence: Sequence) -> None:
        """Record that one of the client's requests no longer waits to start."""
        self._counted.remove(sequence)
        client.num_waiting -= 1
        if client.num_waiting == 0:
            del self._waiting[id(client)]

    def _forget_idle(self) -> None:
        """Drop all tenants without requests except those that arrived last."""
        idle = [name for name, client in self._clients.items() if client.active == 0]
        for name in idle[:-_MAX_IDLE]:
            del self._clients[name]
        self._forget_at = 2 * max(_MAX_IDLE, len(self._clients))

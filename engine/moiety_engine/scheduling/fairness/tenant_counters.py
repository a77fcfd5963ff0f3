"""Virtual token counters of tenants, and queues that serve the tenant with the lowest counter first.

The virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) is a tenant's service,
uncached prompt tokens plus twice the output tokens, divided by its weight. A tenant that had no waiting requests is
lifted to slightly below the lowest counter among those that had: idleness earns credit for a short burst only.

A part of an output's expected length is charged in advance, when the request starts, and corrected when it ends.
Otherwise a tenant that is behind gets so many slots at once that it is far ahead when its requests have run.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from itertools import islice

from moiety_engine.scheduling.fairness.service_counter import ServiceCounter
from moiety_engine.scheduling.queues.entry_heap import EntryHeap
from moiety_engine.sequence import Sequence

_RATE_MEAN_S = 10.0
_MAX_EXAMINED = 64  # tenants; of more, regularly chosen ones are a sample of all
OUTPUT_WEIGHT = 2.0  # cost of an output token relative to a prompt token, as in VTC


class TenantCounter(ServiceCounter):
    """Counter of one tenant within one rank."""

    __slots__ = (
        "active",
        "last_served_s",
        "num_begun",
        "num_queued",
        "pending_tokens",
        "tenant",
        "version",
    )

    def __init__(self, tenant: str) -> None:
        super().__init__()
        self.tenant = tenant
        self.active = 0  # requests of this rank that have not ended
        self.num_queued = 0
        self.num_begun = 0  # requests that have started and have not ended
        self.pending_tokens = 0  # prompt tokens of requests that have not started
        self.last_served_s = 0.0
        self.version = 0  # incremented when the counter falls: queues hold an entry at the old, higher value


class TenantCounters:
    """Accounts of one rank. Idle accounts without relevant state are dropped."""

    def __init__(self) -> None:
        self._accounts: dict[str, TenantCounter] = {}
        self._waiting: list[tuple[float, str]] = []  # a heap; counters may have changed since
        self._floor = 0.0  # lowest counter among tenants with waiting requests, as last seen
        self.total_weight = 0.0  # of active tenants
        self.num_queued = 0  # requests of all tenants
        self.credit = 0.0  # credit that a tenant keeps while it has no waiting requests
        self.has_remote_service = False  # whether any account counts service on other replicas
        self._charged = 0.0  # since the last update of the credit
        self._rate = 0.0  # charged per second, running mean
        self._queued: dict[TenantCounter, None] = {}  # accounts with waiting requests
        self._charge = 1.0  # charge per prompt token including the output that follows; running mean

    def add_request(self, tenant: str, sequence: Sequence, now_s: float) -> TenantCounter:
        """Record a request of the tenant and return its account."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = TenantCounter(tenant)
        if account.active == 0:
            account.weight = max(1e-6, sequence.request.submit.tenant_weight * sequence.service.weight)
            account.last_served_s = now_s
            self.total_weight += account.weight
        account.active += 1
        if account.num_queued == 0:
            account.raise_counter(self.floor() - self.credit / account.weight)
        return account

    def add_waiting(self, account: TenantCounter) -> None:
        """Record one more waiting request of the account."""
        account.num_queued += 1
        self.num_queued += 1
        if account.num_queued > 1:
            return
        self._queued[account] = None
        heappush(self._waiting, (account.counter, account.tenant))

    def remove_waiting(self, account: TenantCounter) -> None:
        """Record that one of the account's requests no longer waits."""
        account.num_queued -= 1
        self.num_queued -= 1
        if account.num_queued == 0:
            del self._queued[account]

    def charge(self, account: TenantCounter, num_prompt: int, num_output: float) -> None:
        """Charge the account for a prompt and for an output of the expected length."""
        cost = num_prompt + OUTPUT_WEIGHT * num_output
        account.counter += cost / account.weight
        self._charged += cost
        self._charge += 0.01 * (cost / max(1, num_prompt) - self._charge)

    def add_remote_service(self, tenant: str, service: float, most_ahead: float) -> None:
        """Add service divided by weight that the tenant received on other replicas.

        A counter that is already more than `most_ahead` above the floor counts as if it were there. So a tenant that
        has other replicas to itself waits for a bounded time when others wait here.
        """
        self.has_remote_service = True
        floor, account = self.floor(), self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = TenantCounter(tenant)
            account.raise_counter(floor - self.credit)
        account.raise_counter(min(account.counter, floor + most_ahead) + service)

    def update_credit(self, seconds: float, burst_s: float, most: float) -> None:
        """Update the credit for idleness: the rank's service in `burst_s` seconds, at most `most`."""
        self._rate += min(1.0, seconds / _RATE_MEAN_S) * (self._charged / seconds - self._rate)
        self._charged = 0.0
        self.credit = min(most, burst_s * self._rate)

    def tokens_ahead(self, account: TenantCounter | None, weight: float) -> float:
        """Return the waiting prompt tokens that will be served before the account's next request, by the counters.

        These are its own, and those of each other account that raise its counter to the value that this account's
        counter will have by then.
        """
        own = 0 if account is None else account.pending_tokens
        counter = self.floor() - self.credit / weight
        if account is not None:
            counter = max(counter, account.counter)
        until = counter + own * self._charge / weight
        stride = 1 + len(self._queued) // _MAX_EXAMINED
        ahead = 0.0
        for other in islice(self._queued, 0, None, stride):
            if other is not account:
                ahead += min(other.pending_tokens, max(0.0, until - other.counter) * other.weight / self._charge)
        return own + ahead * stride

    def get(self, tenant: str) -> TenantCounter | None:
        return self._accounts.get(tenant)

    def remove_request(self, account: TenantCounter) -> None:
        account.active -= 1
        if account.active == 0:
            self.total_weight -= account.weight
            self._forget_idle()

    def floor(self) -> float:
        """Return the lowest counter among tenants with waiting requests, or its last value if there are none."""
        heap = self._waiting
        while heap:
            counter, tenant = heap[0]
            account = self._accounts.get(tenant)
            if account is None or account.num_queued == 0:
                heappop(heap)
            elif counter != account.counter:
                heapreplace(heap, (account.counter, tenant))
                if account.counter < counter:
                    break
            else:
                break
        if heap:
            self._floor = max(self._floor, heap[0][0])
        return self._floor

    def others_wait(self, account: TenantCounter) -> bool:
        """Return whether any other tenant has requests waiting."""
        return len(self._queued) > (account in self._queued)

    def _forget_idle(self) -> None:
        """Drop idle accounts with counters at or below the floor, near which a new account starts."""
        if len(self._accounts) > 64 and len(self._accounts) > 4 * len(self._waiting):
            floor = self.floor()
            self._accounts = {t: a for t, a in self._accounts.items() if a.active or a.counter > floor}


class FairQueue:
    """Queue of sequences by tenant: the tenant with the lowest counter first, within a tenant by key."""

    def __init__(self) -> None:
        self.heaps: dict[
            TenantCounter, EntryHeap
        ] = {}  # by account, held ones included; callers read whether any is there
        # (counter, tie, version, account); without entries, there is no sequence
        self.order: list[tuple[float, int, int, TenantCounter]] = []
        self._ties = 0
        self._held: set[TenantCounter] = set()
        self._passed: dict[TenantCounter, int] = {}  # held accounts taken out of the order, with their version

    def __bool__(self) -> bool:
        return bool(self.order)

    def push(self, account: TenantCounter, sequence: Sequence, key: float) -> None:
        heap = self.heaps.get(account)
        if heap is None:
            heap = self.heaps[account] = EntryHeap()
            self._enqueue(account)
        heap.push(key, sequence)

    def requeue(self, account: TenantCounter) -> None:
        """Enter the account anew in the order after its counter fell and its version was incremented."""
        if account in self.heaps:
            self._enqueue(account)

    def pop(self) -> Sequence | None:
        """Remove and return the first sequence; None if there is none."""
        order = self.order
        while order:
            counter, tie, version, account = order[0]
            heap = self.heaps.get(account)
            if heap is None or version != account.version:
                heappop(order)
                continue
            if account in self._held:
                self._passed[account] = version
                heappop(order)
                continue
            if counter < account.counter and heap.first() is not None:
                heapreplace(order, (account.counter, tie, version, account))
            elif (found := heap.pop_until(None)) is not None:
                return found
            else:
                del self.heaps[account]
                heappop(order)
        return None

    def hold(self, account: TenantCounter) -> None:
        """Skip the account until `release`."""
        self._held.add(account)

    def release(self) -> None:
        """End all holds."""
        for account, version in self._passed.items():
            if version == account.version:  # else it is already entered anew
                self.requeue(account)
        self._passed.clear()
        self._held.clear()

    def pop_of(self, account: TenantCounter) -> Sequence | None:
        """Remove and return the tenant's first sequence out of turn; None if it has none here."""
        heap = self.heaps.get(account)
        return None if heap is None else heap.pop()

    def _enqueue(self, account: TenantCounter) -> None:
        self._ties += 1
        heappush(self.order, (account.counter, self._ties, account.version, account))

"""Queue of the `moiety` policy.

Requests at risk go before others, then by rank; within a rank, preempted or nearly complete requests go first, then the
tenants by their counters; within a tenant, demoted requests go last.

A request moves between buckets at times that are known when it enters, so that it is not examined earlier. Beside this
order, a boost lane has a small part of the engine's time, for requests that have waited beyond their class's bound and
for tenants that have not been served for long.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from moiety_engine.scheduling.fairness.tenant_counters import FairQueue, TenantCounter, TenantCounters
from moiety_engine.scheduling.policies.moiety.request_record import (
    AT_RISK,
    DEMOTED,
    SAFE,
    RequestRecord,
    RequestRecords,
)
from moiety_engine.scheduling.policies.moiety.slo_tracker import SloTracker
from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_engine.scheduling.queues.class_counters import ClassCounters
from moiety_engine.scheduling.queues.entry_heap import EntryHeap
from moiety_engine.sequence import Sequence, SequenceState
from moiety_wire.classes import ServiceClass
from moiety_wire.trace_events import EventKind, Reason

_LAST_KEY = 1e12  # a key after every deadline
_PATIENT_S = 60.0  # a request with a deadline this far away can let others pass without harm


class UrgencyQueue:
    """Queue of sequences that need prefill. O(log n) to enter, move and leave."""

    def __init__(
        self,
        tuning: Tuning,
        pace: SloTracker,
        accounts: dict[int, TenantCounters],
        records: RequestRecords,
        tally: ClassCounters,
    ) -> None:
        self._tuning = tuning
        self._slo = pace
        self._accounts = accounts  # by rank
        self._records = records
        self._tally = tally
        self._queues: dict[tuple[int, int, bool], FairQueue] = {}  # by (bucket, rank, has not begun)
        self._levels: list[tuple[tuple[int, int, bool], FairQueue]] = []  # the same, in the order of service
        self._best_rank = 0  # of the requests queued so far
        self._spot_ranks: set[int] = set()
        self._holding: list[FairQueue] = []
        self._moves = EntryHeap()  # by the time of the next change of bucket
        self._waited = EntryHeap()  # by the time at which the wait becomes too long
        self._starved: list[tuple[float, int, TenantCounter]] = []  # when a tenant lacked service for too long
        self._lane_s = 0.0  # time that the lane may spend
        self._on_lane: dict[Sequence, int] = {}  # taken by the lane in this step, with the tokens lacking then
        self._ties = 0
        self.num_queued = 0
        self.num_spot_queued = 0
        self._holds_spot = False  # spot requests get nothing of the step that is being filled

    def push(self, sequence: Sequence, now_s: float) -> None:
        if sequence.enter_queue():
            account = self._records[sequence].tenant
            self.num_queued += 1
            self.num_spot_queued += sequence.service.spot
            self._accounts[sequence.service.rank].add_waiting(account)
            if account.num_queued == 1 and not sequence.service.spot:
                self._ties += 1
                heappush(self._starved, (account.last_served_s + self._tuning.starved_s, self._ties, account))
        self._enqueue(sequence, now_s)

    def pop(self, now_s: float) -> Sequence | None:
        moves = self._moves
        while moves.entries and moves.entries[0][0] <= now_s and (moved := moves.pop_until(now_s)) is not None:
            moved.entry += 2  # it stays queued, and its old entry is void
            self._enqueue(moved, now_s)
        found = self._pop_lane(now_s) if self._lane_s > 0 else None
        if found is None:
            for level, queue in self._levels:
                if self._holds_spot and level[1] in self._spot_ranks:
                    continue
                if queue.order and (found := queue.pop()) is not None:
                    break
        if found is not None:
            self._dequeue(found)
        return found

    def discard(self, sequence: Sequence) -> None:
        if sequence.entry & 1:
            self._dequeue(sequence)

    def requeue_tenant(self, account: TenantCounter, rank: int) -> None:
        """Renew the account's position in all queues of the rank after its counter was lowered."""
        account.version += 1
        for level, queue in self._levels:
            if level[1] == rank:
                queue.requeue(account)

    def hold(self, account: TenantCounter, rank: int) -> None:
        """Skip the account's requests until the next step, except on the boost lane."""
        for level, queue in self._levels:
            if level[1] == rank:
                queue.hold(account)
                self._holding.append(queue)

    def _release(self) -> None:
        for queue in self._holding:
            queue.release()
        self._holding.clear()

    @property
    def others_wait(self) -> bool:
        """True while requests of other classes than spot classes need prefill."""
        return self.num_queued > self.num_spot_queued

    def begin_step(self) -> None:
        """End all holds, and skip spot requests until the next call if others wait."""
        if self._holding:
            self._release()
        self._holds_spot = bool(self._spot_ranks) and self.others_wait

    def update_boost_lane(self, seconds: float) -> None:
        """Give the boost lane its part of a step's time, and refund time that it took and did not use."""
        unused, lane = 0, self._on_lane
        if lane:
            open_ = [(s, lacked) for s, lacked in lane.items() if s.state is not SequenceState.ENDED]
            unused = sum(min(lacked, sequence.num_uncomputed) for sequence, lacked in open_)
            lane.clear()
        self._lane_s += self._tuning.boost_part * seconds + unused * self._slo.token_s
        self._lane_s = min(self._tuning.lane_saved_s, self._lane_s)

    def has_at_risk(self, rank: int) -> bool:
        """Return whether a request of this rank may be at risk."""
        begun, others = self._queues.get((AT_RISK, rank, False)), self._queues.get((AT_RISK, rank, True))
        return bool((begun is not None and begun.order) or (others is not None and others.order))

    def may_have_better(self, rank: int) -> bool:
        """Return whether requests of a better rank may be queued, held ones included."""
        if rank <= self._best_rank:
            return False
        ranks = [level[1] for level, queue in self._levels if queue.heaps]
        return bool(ranks) and min(ranks) < rank

    def _dequeue(self, sequence: Sequence) -> None:
        service = sequence.service
        if sequence.entry & 1:
            sequence.entry += 1  # as `Sequence.leave_queue`
            self.num_queued -= 1
            self.num_spot_queued -= service.spot
        self._accounts[service.rank].remove_waiting(self._records[sequence].tenant)

    def _enqueue(self, sequence: Sequence, now_s: float) -> None:
        """Add the sequence to the queue of its bucket, and schedule its move to the next. Voids older entries."""
        record, service = self._records[sequence], sequence.service
        rank, spot, scheduled_ns = service.rank, service.spot, sequence.timeline.scheduled_unix_ns
        bucket, moves_at_s = (SAFE, math.inf) if spot else self._bucket(sequence, now_s)
        if bucket == DEMOTED and not record.demoted:
            record.demoted = True
            if scheduled_ns == 0:
                self._slo.demand.remove_tokens(service, sequence.kv.num_uncached)
            sequence.timeline.note(int(now_s * 1e9), EventKind.DEMOTED, Reason.SLO_UNATTAINABLE)
            self._tally.of(service.name).demoted += 1
        record.bucket = bucket
        # a demoted stream of the best rank stays in the first bucket: it yields only to its own tenant's requests
        first = bucket == AT_RISK or (rank <= self._slo.best_rank and self._is_best_stream(service))
        if spot:
            self._spot_ranks.add(rank)
        level = (AT_RISK if first else SAFE, rank, scheduled_ns == 0 or not self._has_begun(sequence))
        queue = self._queues.get(level)
        if queue is None:
            queue = self._queues[level] = FairQueue()
            self._levels = sorted(self._queues.items())  # those at risk first, then rank by rank
            self._best_rank = min(of_rank for (_, of_rank, _), _ in self._levels)
        queue.push(record.tenant, sequence, self._key(sequence, record))
        if spot:
            pass  # it waits as long as others need the engine
        elif not record.boosted:
            since_s = now_s if scheduled_ns > 0 else sequence.request.arrival_s
            self._waited.push(since_s + service.max_queue_s, sequence)
        elif sequence.state is SequenceState.RUNNING:
            self._waited.push(0.0, sequence)  # the lane completes what it began: half of a prompt only occupies a slot
        else:
            self._waited.push(now_s, sequence)
        if moves_at_s < math.inf:
            self._moves.push(moves_at_s, sequence)

    def _bucket(self, sequence: Sequence, now_s: float) -> tuple[int, float]:
        """Return (bucket, time of the next move)."""
        bucket_if_late = DEMOTED if self._tuning.demotion else AT_RISK
        need_s = sequence.num_uncomputed * self._slo.token_s
        if sequence.service.ttft_s is not None:
            if not sequence.deadlines.on_time:
                return bucket_if_late, math.inf
            deadline_s = sequence.deadlines.due_s if sequence.num_output else sequence.deadlines.first_s
            if deadline_s == math.inf:
                return SAFE, math.inf
        else:
            deadline_s = sequence.deadlines.completion_s
            longest = min(self._tuning.length_margin * sequence.predicted_output, sequence.request.submit.max_tokens)
            need_s += max(1.0, longest - sequence.num_output) * self._slo.step_s
        late_s = deadline_s - need_s
        risk_s = deadline_s - self._tuning.risk_factor * need_s - 2 * self._slo.longest_step_s
        if now_s >= late_s:
            return bucket_if_late, math.inf
        demotes_at_s = late_s if self._tuning.demotion else math.inf
        rank = sequence.service.rank
        if rank in self._slo.by_work:  # no request of the rank goes first for being nearly late
            return (AT_RISK if rank <= self._slo.best_rank else SAFE), (risk_s if now_s < risk_s else demotes_at_s)
        if now_s >= risk_s or self._is_best_stream(sequence.service):
            return AT_RISK, demotes_at_s
        return SAFE, risk_s

    def _key(self, sequence: Sequence, record: RequestRecord) -> float:
        """Return the sort key within a tenant.

        It is the deadline, moved by the remaining work as the load grows; for demoted requests, the arrival.
        """
        if record.bucket == DEMOTED:
            return _LAST_KEY + sequence.request.arrival_s
        interactive = sequence.service.ttft_s is not None
        deadline_s = sequence.deadlines.first_s if interactive else sequence.deadlines.completion_s
        blend = self._slo.by_work.get(sequence.service.rank)
        if blend is None:
            blend = self._slo.blend * min(1.0, (deadline_s - sequence.request.arrival_s) / _PATIENT_S)
        return deadline_s + blend * sequence.num_uncomputed * self._slo.token_s

    def _has_begun(self, sequence: Sequence) -> bool:
        """Return whether it has begun and precedes those that have not: it was preempted or is nearly complete."""
        if sequence.timeline.scheduled_unix_ns == 0:
            return False
        need_s = sequence.num_uncomputed * self._slo.token_s
        return (
            sequence.timeline.num_preemptions > 0 or need_s <= self._tuning.nearly_done_steps * self._slo.longest_step_s
        )

    def _is_best_stream(self, service: ServiceClass) -> bool:
        slo = self._slo
        return service.ttft_s is not None and service.rank <= slo.best_rank and service.rank not in slo.by_work

    # ── the boost lane ──

    def _pop_lane(self, now_s: float) -> Sequence | None:
        starved = self._starved
        found = self._pop_starved(now_s) if starved and starved[0][0] <= now_s else None
        if found is None:
            found = self._pop_waited(now_s)
        if found is not None:
            self._lane_s -= found.num_uncomputed * self._slo.token_s + 0.001
            self._on_lane[found] = found.num_uncomputed
        return found

    def _pop_waited(self, now_s: float) -> Sequence | None:
        """Pop for a request that has waited too long: itself if it was demoted, else the first of its rank."""
        sequence = self._waited.pop_until(now_s)
        if sequence is None:
            return None
        self._boost(sequence, now_s)
        if self._records[sequence].demoted:
            return sequence
        found = self._pop_rank(sequence.service.rank)
        if found is not sequence:
            self._waited.push(now_s, sequence)  # it is still waiting
        return found

    def _pop_starved(self, now_s: float) -> Sequence | None:
        """Pop the first request of a tenant that has not been served for long."""
        while self._starved and self._starved[0][0] <= now_s:
            _, _, account = heappop(self._starved)
            if account.num_queued == 0:
                continue
            due_s = account.last_served_s + self._tuning.starved_s
            if due_s <= now_s:
                due_s = now_s + self._tuning.starved_s
                found = self._pop_of(account)
            else:
                found = None
            self._ties += 1
            heappush(self._starved, (due_s, self._ties, account))
            if found is not None:
                self._boost(found, now_s)
                return found
        return None

    def _boost(self, sequence: Sequence, now_s: float) -> None:
        record = self._records[sequence]
        if not record.boosted:
            record.boosted = True
            sequence.timeline.note(int(now_s * 1e9), EventKind.BOOSTED, Reason.WAITED_TOO_LONG)
            self._tally.of(sequence.service.name).boosted += 1

    def _pop_rank(self, rank: int) -> Sequence | None:
        for level, queue in self._levels:
            if level[1] == rank and (found := queue.pop()) is not None:
                return found
        return None

    def _pop_of(self, account: TenantCounter) -> Sequence | None:
        for _, queue in self._levels:
            found = queue.pop_of(account)
            if found is not None:
                return found
        return None

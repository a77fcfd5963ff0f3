"""Default policy: meets the SLO of every class and gives every tenant its fair share.

Sequences that need prefill are in one of three buckets. *At risk*: the deadline is so near that it must run now.
*Safe*: there is time. *Demoted*: the SLO can hardly be met any more, and the request must not delay others. Requests at
risk go first, better ranks before worse; then the others, rank by rank. Within a rank the tenant with the lowest
virtual token counter goes first; within a tenant, the earliest deadline, blended with remaining work as the load grows,
and demoted requests last. A small part of the time is kept for requests that have waited beyond their class's bound and
for tenants that have not been served for long, so that none starves (`urgency_queue`).

A step lasts no longer than the running requests' next tokens can wait, and no request joins whose decoding would make
steps too long for the TPOT targets of the recent classes (`slo_tracker`). If decoding alone takes longer than the best
rank's SLOs allow, worse ranks take turns (`decode_pacing`). Blocks are divided by reservations, predicted peaks and
shares (`kv_admission`), and requests are admitted by predicted waiting times (`admission`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from moiety_engine.scheduling.admission.prompt_flow import PromptFlow
from moiety_engine.scheduling.fairness.tenant_counters import OUTPUT_WEIGHT, TenantCounters
from moiety_engine.scheduling.plan import Chunk
from moiety_engine.scheduling.policies.moiety.decode_pacing import DecodePacing
from moiety_engine.scheduling.policies.moiety.kv_admission import KvAdmission
from moiety_engine.scheduling.policies.moiety.request_record import AT_RISK, RequestRecord, RequestRecords
from moiety_engine.scheduling.policies.moiety.slo_tracker import SloTracker
from moiety_engine.scheduling.policies.moiety.spot_decodes import SpotDecodes, context_of
from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_engine.scheduling.policies.moiety.urgency_queue import UrgencyQueue
from moiety_engine.scheduling.policies.policy_interface import (
    AdmissionDecision,
    BatchView,
    Policy,
    PolicyContext,
    StepBudget,
    vtc_bound,
)
from moiety_engine.scheduling.step_time.step_time_model import StepShape
from moiety_engine.sequence import Sequence
from moiety_wire.classes import OverloadAction, ServiceClass
from moiety_wire.trace_events import Reason


class Moiety(Policy):
    """The `moiety` policy; see the module's docstring."""

    sizes_chunks = True
    counts_tenant_service = True
    serves_spot = True

    def __init__(self, context: PolicyContext, tuning: Tuning | None = None) -> None:
        super().__init__(context)
        self.tuning = tuning or Tuning()
        self._accounts: dict[int, TenantCounters] = {}  # by rank
        self._records: RequestRecords = {}  # of requests that have not ended
        self._unaccounted_s = 0.0  # time that is not yet passed to the accounts
        self._flow = PromptFlow(context.step_time, context.max_batch_tokens)
        self._slo = SloTracker(self.tuning, self._flow)
        self._queue = UrgencyQueue(self.tuning, self._slo, self._accounts, self._records, context.tally)
        self._kv_admission = KvAdmission(context, self.tuning, self._accounts, self._records)
        self._spot = SpotDecodes(self.tuning, self._slo, context.step_time)
        self._pacing = DecodePacing(self.tuning, self._slo, context.step_time, batches_experts=context.batches_experts)

    def set_expert_batching(self, enabled: bool) -> None:
        """Switch expert batching on or off, for comparisons of both on the same requests."""
        self._pacing.batches_experts = enabled

    # ── prefill queue ──

    def push(self, sequence: Sequence, now_s: float) -> None:
        self._queue.push(sequence, now_s)

    def pop(self, now_s: float) -> Sequence | None:
        return self._queue.pop(now_s)

    def discard(self, sequence: Sequence) -> None:
        self._queue.discard(sequence)

    @property
    def num_queued(self) -> int:
        return self._queue.num_queued

    # ── events ──

    def arrived(self, sequence: Sequence, now_s: float) -> None:
        service = sequence.service
        accounts = self._accounts.setdefault(service.rank, TenantCounters())
        account = accounts.add_request(self._name_of(sequence), sequence, now_s)
        self._records[sequence] = RequestRecord(account)
        account.pending_tokens += sequence.kv.num_uncached
        self._spot.num_open += service.spot
        self._flow.add_request(service.rank, sequence.kv.num_uncached, now_s)
        self._slo.demand.add_tokens(service, sequence.kv.num_uncached, now_s)
        self._slo.record_class(service, now_s)
        sequence.predicted_output = self.context.lengths.expected(
            sequence.request.tenant,
            longer_than=sequence.request.num_resumed,
            at_most=sequence.request.submit.max_tokens,
        )

    def started(self, sequence: Sequence, num_uncached: int, now_s: float) -> None:
        record = self._records[sequence]
        account = record.tenant
        account.last_served_s = now_s
        account.num_begun += 1
        self._kv_admission.victims.slots_changed()
        self._stop_waiting(sequence, record)
        prepaid = self.tuning.prepaid * (sequence.predicted_output - sequence.request.num_resumed)
        record.charged_tokens = sequence.request.num_resumed + prepaid
        if self.served_tenants is not None:
            self.served_tenants.track(account, sequence.service.rank, account.tenant)
        self._accounts[sequence.service.rank].charge(account, num_uncached, prepaid)
        self._kv_admission.reserve(sequence)

    def decoded(self, sequences: list[Sequence]) -> None:
        record_of = self._records.get
        for sequence in sequences:
            record = record_of(sequence)
            if record is None:  # it has ended
                continue
            num_output = len(sequence.tokens) - sequence.request.num_prompt
            owed = num_output - record.charged_tokens
            if owed > 0:
                record.charged_tokens = num_output
                record.tenant.counter += OUTPUT_WEIGHT * owed / record.tenant.weight
                if num_output > sequence.predicted_output:
                    sequence.predicted_output = self.context.lengths.expected(
                        sequence.request.tenant, longer_than=num_output, at_most=sequence.request.submit.max_tokens
                    )

    def stepped(self, seconds: float, shape: StepShape, now_s: float) -> None:
        self._queue.update_boost_lane(seconds)
        self._kv_admission.time_passed(seconds)
        self._slo.record_step(seconds)
        if self._queue.num_queued:
            self._flow.record_backlogged_step(seconds, shape.prefill_rows)
        if now_s >= self._slo.refresh_at_s:
            self._slo.refresh(now_s)
        self._unaccounted_s += seconds
        if self._unaccounted_s >= 1.0:
            for accounts in self._accounts.values():
                accounts.update_credit(self._unaccounted_s, self.tuning.burst_s, self.context.kv_tokens / 2)
            self._unaccounted_s = 0.0

    def preempted(self, sequence: Sequence, beneficiary: Sequence | None, cost_s: float) -> None:
        self._kv_admission.preempted(sequence, beneficiary, cost_s)

    def ended(self, sequence: Sequence, now_s: float) -> None:
        record = self._records.pop(sequence)
        account, rank = record.tenant, sequence.service.rank
        self._spot.num_open -= sequence.service.spot
        if sequence.timeline.scheduled_unix_ns == 0:
            self._stop_waiting(sequence, record)
        else:
            account.num_begun -= 1
            unused = record.charged_tokens - sequence.num_output
            account.counter -= OUTPUT_WEIGHT * unused / account.weight
            if unused > 0:
                self._queue.requeue_tenant(account, rank)
        self._accounts[rank].remove_request(account)
        self._kv_admission.ended(sequence)

    def add_remote_service(self, rank: int, tenant: str, service: float, slack: float) -> None:
        accounts = self._accounts.get(rank)
        if accounts is not None and self.tuning.fairness:  # else nobody is behind the tenant here
            accounts.add_remote_service(tenant, service, vtc_bound(self.context) + slack)

    def _stop_waiting(self, sequence: Sequence, record: RequestRecord) -> None:
        """Record that the sequence starts, or ends without having started."""
        record.tenant.pending_tokens -= sequence.kv.num_uncached
        self._flow.remove_tokens(sequence.service.rank, sequence.kv.num_uncached)
        if not record.demoted:
            self._slo.demand.remove_tokens(sequence.service, sequence.kv.num_uncached)

    # ── admission ──

    def admit(self, sequence: Sequence, now_s: float) -> AdmissionDecision:
        self._slo.refresh(now_s)
        decision = self._decide_admission(sequence, sequence.service)
        fallback = sequence.request.submit.fallback
        if decision.service is None and fallback and sequence.service.on_overload is OverloadAction.DOWNGRADE:
            second = self._decide_admission(sequence, fallback)
            if second.service is not None:
                return AdmissionDecision(fallback, decision.reason, second.predicted_ttft_s)
        return decision

    def overflow(self, sequence: Sequence) -> AdmissionDecision:
        wait_s = self._flow.wait_s(sequence.service.rank, math.inf)
        return AdmissionDecision(None, Reason.QUEUE_FULL, retry_after_s=max(1.0, wait_s / 2))

    def predicted_ttft_s(self) -> dict[str, float]:
        return {c.name: self._flow.wait_s(c.rank, math.inf) + self._slo.step_s for c in self._slo.classes}

    def _decide_admission(self, sequence: Sequence, service: ServiceClass) -> AdmissionDecision:
        accounts = self._accounts.get(service.rank)
        account = accounts.get(self._name_of(sequence)) if accounts is not None else None
        if account is not None and account.num_queued and account.num_queued >= self._slots_of_tenant(service.rank):
            retry_s = self._flow.wait_s(service.rank, account.pending_tokens) / 2
            return AdmissionDecision(None, Reason.TENANT_QUEUE_FULL, retry_after_s=max(1.0, retry_s))
        weight = max(1e-6, sequence.request.submit.tenant_weight * service.weight)
        ahead = 0.0 if accounts is None else accounts.tokens_ahead(account, weight)
        wait_s = self._flow.wait_s(service.rank, ahead)
        waited_s = sequence.request.waited_s
        predicted_s = waited_s + wait_s + sequence.kv.num_uncached * self._slo.token_s + self._slo.step_s
        if service.ttft_s is None or not self.tuning.admission:
            return AdmissionDecision(service, Reason.IN_TIME, predicted_s)
        num_allowed = sequence.kv.num_uncached + sequence.request.submit.sibling_tokens
        target_s = service.ttft_s + service.ttft_per_1k_s * num_allowed / 1000
        best = service.rank <= self._slo.best_rank
        if predicted_s <= (self.tuning.ttft_margin_of_best if best else self.tuning.ttft_margin) * target_s:
            return AdmissionDecision(service, Reason.IN_TIME, predicted_s)
        if service.on_overload is OverloadAction.QUEUE or wait_s <= self.tuning.wait_unasked * target_s:
            return AdmissionDecision(service, Reason.ACCEPTED_LATE, predicted_s)
        return AdmissionDecision(None, Reason.PREDICTED_LATE, predicted_s, max(1.0, predicted_s - target_s))

    # ── a step ──

    def decodes_of_step(self, decoding: list[Chunk], num_context: int, now_s: float) -> list[Chunk]:
        if self._spot.num_open:
            decoding = self._spot.select(decoding, others_wait=self._queue.others_wait)
            num_context = context_of(decoding)
        if not self.tuning.chunk_sizing:
            return decoding
        best = self._accounts.get(self._slo.best_rank)
        best_waits = best is not None and best.num_queued > 0
        return self._pacing.select(decoding, num_context, now_s, best_waits=best_waits)

    def step_budget(self, view: BatchView, now_s: float) -> StepBudget | None:
        self._queue.begin_step()
        self._kv_admission.victims.slots_changed()
        if not self.tuning.chunk_sizing:
            return None
        urgent = self._queue.has_at_risk(self._slo.best_rank)
        part = self.tuning.slack_used_if_urgent if urgent else self.tuning.slack_used
        alone_s = self._pacing.predict_s(view.shape)
        seconds = min(max(self._slo.longest_step_s, 2 * alone_s), part * view.slack_s)
        floor_tokens, pacing = self.tuning.floor_tokens, self._pacing
        of_spot = self._spot.budget(view, seconds) if self._spot.num_open else None
        if pacing.limit_s == math.inf and pacing.leaves_floor:
            return StepBudget(seconds, floor_tokens, of_spot=of_spot)
        of_worse = StepBudget(min(seconds, pacing.limit_s), floor_tokens if pacing.leaves_floor else 0)
        return StepBudget(seconds, floor_tokens, self._slo.best_rank, of_worse, of_spot)

    def gives_way(self, sequence: Sequence) -> bool:
        return sequence.service.spot and self._queue.others_wait

    def delays(self, sequence: Sequence, view: BatchView, num_blocks: int, now_s: float) -> Reason | None:
        if self._slows_too_much(sequence, view):
            return Reason.BATCH_FULL
        if self._crowds_out(sequence, view):
            # covers all of the tenant's waiting requests in this step
            self._queue.hold(self._records[sequence].tenant, sequence.service.rank)
            return Reason.SHARE_FULL
        return self._lacks_blocks(sequence, view, num_blocks)

    def may_overtake(self, blocked: Sequence, view: BatchView, now_s: float) -> bool:
        if self._kv_admission.far_over_share(blocked, view):
            return True  # it waits for other requests of its own tenant
        if self._records[blocked].boosted:  # it gets the blocks that become free, unless the best rank needs them
            return blocked.service.rank > self._slo.best_rank and self._queue.has_at_risk(self._slo.best_rank)
        return blocked.timeline.num_overtaken < self.tuning.max_overtaken

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, now_s: float, *, takes_blocks: bool = True
    ) -> list[Sequence]:
        return self._kv_admission.victims.ordered(running, beneficiary, takes_blocks=takes_blocks)

    def looks_past_full_batch(self, blocked: Sequence, running: Iterable[Sequence]) -> bool:
        """Skip the tenant of `blocked` in this step if other tenants of its rank wait.

        These may hold less than their share of batch slots. A boosted request was taken out of turn, so that its tenant
        is not skipped. Return False if none can gain a slot.
        """
        record, rank = self._records[blocked], blocked.service.rank
        if record.boosted:
            return True
        if not self.tuning.fairness or not self._accounts[rank].others_wait(record.tenant):
            return False
        if not self._kv_admission.victims.some_tenant_exceeds_slots(rank):
            return False
        self._queue.hold(record.tenant, rank)
        return True

    def full_batch_is_final(self) -> bool:
        worst_rank = self.context.running.worst_rank
        if self._queue.may_have_better(worst_rank):
            return False
        return not self._kv_admission.victims.some_tenant_exceeds_slots(worst_rank)

    def waiting_for_others(self, growing: list[Sequence]) -> list[Sequence]:
        return self._kv_admission.waiting_for_others(growing)

    # ── internal ──

    def _lacks_blocks(self, sequence: Sequence, view: BatchView, num_blocks: int) -> Reason | None:
        """Return the reason if blocks, or its tenant's share of them, keep the sequence out of the batch; else None."""
        if not self._kv_admission.keeps_guarantees(sequence):
            return Reason.NO_BLOCKS
        if view.lacks_blocks and self._kv_admission.over_share(sequence, view, num_blocks):
            return Reason.SHARE_FULL
        if view.blocks_free - num_blocks >= view.blocks_total / 2:
            return None
        if self._records[sequence].bucket == AT_RISK and view.worst_rank > sequence.service.rank:
            return None  # these are preempted
        fits = self._kv_admission.peak_fits(view, sequence) or self._kv_admission.victims.may_reclaim(sequence, view)
        return None if fits else Reason.NO_BLOCKS

    def _slows_too_much(self, sequence: Sequence, view: BatchView) -> bool:
        """Return whether decoding with the sequence would take too much of the TPOT that running requests still meet.

        This never delays the best rank, boosted requests, or a request at risk in favour of worse ranks.
        """
        tpot_s, rank = self._slo.tpot_s, sequence.service.rank
        record = self._records[sequence]
        if math.inf in (view.slack_s, tpot_s) or rank <= self._slo.best_rank or record.boosted:
            return False
        if not self.tuning.chunk_sizing or (
            record.bucket == AT_RISK
            and all(s.service.rank >= rank for s in view.running if s.deadlines.due_s < math.inf)
        ):
            return False
        return self._decode_s(view, sequence) > self.tuning.decode_part * tpot_s

    def _crowds_out(self, sequence: Sequence, view: BatchView) -> bool:
        """Return whether a tenant with its share of slots would make decoding too long with one more request.

        Prompts of tenants with smaller demand would then wait for it.
        """
        tpot_s = sequence.service.tpot_s
        if tpot_s is None or not view.running or not self._kv_admission.has_its_slots(sequence):
            return False
        return self._decode_s(view, sequence) > self.tuning.decode_part_beyond_share * tpot_s

    def _decode_s(self, view: BatchView, newcomer: Sequence) -> float:
        """Return the predicted duration of a step that decodes all running sequences and the newcomer."""
        running = view.running
        if self._spot.num_open and not newcomer.service.spot:
            running = [s for s in running if not s.service.spot]  # they give way
        shape = StepShape(len(running) + 1, 0, view.shape.decode_context + len(newcomer.tokens), 0)
        return self.context.step_time.predict_s(shape)

    def _slots_of_tenant(self, rank: int) -> float:
        """Return how many queue slots one tenant's requests of this rank may take.

        Worse ranks do not count as taken, since they are shed when necessary.
        """
        taken = sum(accounts.num_queued for other, accounts in self._accounts.items() if other <= rank)
        return self.tuning.tenant_queue * max(0, self.context.max_waiting - taken)

    def _name_of(self, sequence: Sequence) -> str:
        return sequence.request.tenant if self.tuning.fairness else ""

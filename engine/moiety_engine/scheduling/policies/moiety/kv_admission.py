"""Admission to the batch by KV blocks: tenants' shares, predicted peaks and reservations."""

from __future__ import annotations

from moiety_engine.scheduling.fairness.tenant_counters import TenantCounters
from moiety_engine.scheduling.policies.moiety.kv_reservations import KvReservations
from moiety_engine.scheduling.policies.moiety.preemption_victims import PreemptionVictims
from moiety_engine.scheduling.policies.moiety.request_record import RequestRecords
from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_engine.scheduling.policies.policy_interface import BatchView, PolicyContext
from moiety_engine.sequence import Sequence

_MEAN_S = 20.0
_LEARNING = 0.01  # change of the overcommitment per second, as a fraction of all blocks


class KvAdmission:
    """Decides by predictions, shares and reservations; takes no blocks itself."""

    def __init__(
        self, context: PolicyContext, tuning: Tuning, accounts: dict[int, TenantCounters], records: RequestRecords
    ) -> None:
        self._context = context
        self._tuning = tuning
        self._accounts = accounts  # by rank
        self._records = records
        self._guarantees = KvReservations(context.num_blocks, context.layout)
        self._overcommit = 1.0  # predicted demand of the batch that is allowed, as a fraction of all blocks
        self._preemption_share = 0.0  # fraction of the time that preemptions cost; running mean
        self._held_back = False  # whether the predicted peak recently kept a request out of the batch
        self.victims = PreemptionVictims(context, tuning, accounts, records, self._guarantees)

    def time_passed(self, seconds: float) -> None:
        tuning = self._tuning
        self.victims.time_passed(seconds)
        self._preemption_share *= 1 - min(1.0, seconds / _MEAN_S)
        low, high = tuning.overcommit_range
        if self._preemption_share > tuning.preemption_part:
            self._overcommit = max(low, self._overcommit - _LEARNING * seconds)
        elif self._held_back:
            self._overcommit = min(high, self._overcommit + _LEARNING * seconds)
        self._held_back = False

    def preempted(self, sequence: Sequence, beneficiary: Sequence | None, cost_s: float) -> None:
        self.victims.preempted(sequence, beneficiary, cost_s)
        if sequence.service.spot:
            return  # as often as others need its blocks; overcommitment, which its cost would reduce, is theirs
        self._preemption_share += cost_s / _MEAN_S
        if sequence.timeline.num_preemptions >= self._tuning.max_preemptions:
            self._guarantees.guarantee(sequence)

    def ended(self, sequence: Sequence) -> None:
        self._guarantees.forget(sequence)

    # ── joining the batch ──

    def reserve(self, sequence: Sequence) -> None:
        """Reserve blocks for the sequence if its class may not be preempted."""
        if not sequence.service.preemptible:
            self._guarantees.reserve(sequence, self._predicted_peak(sequence))

    def keeps_guarantees(self, candidate: Sequence) -> bool:
        """Return whether all reservations, including that of the candidate if it has one, can be honoured."""
        if not candidate.service.preemptible:
            num_tokens = self._predicted_peak(candidate)
            if candidate.timeline.scheduled_unix_ns:  # it may have a reservation
                num_tokens = max(num_tokens, self._guarantees.reserved_tokens(candidate))
            return self._guarantees.can_join(candidate, num_tokens)
        if candidate.service.spot or candidate.timeline.num_preemptions < self._tuning.max_preemptions:
            return True
        return self._guarantees.can_join(candidate, 0)

    def waiting_for_others(self, growing: list[Sequence]) -> list[Sequence]:
        """Return the sequences, of those that need one more block now, that must wait until others have ended."""
        return self._guarantees.waiting_for_others(growing)

    def over_share(self, sequence: Sequence, view: BatchView, num_blocks: int) -> bool:
        """Return whether its tenant would exceed its share of blocks with `num_blocks` more."""
        return (
            view.tenant_blocks(sequence.request.tenant) + num_blocks > self.victims.share(sequence) * view.blocks_total
        )

    def has_its_slots(self, newcomer: Sequence) -> bool:
        """Return whether its tenant holds its share of slots and has been served no less than the waiting tenants.

        Always False if the tenant is the only one of its rank, or if the sequence was scheduled before.
        """
        account = self._records[newcomer].tenant
        share = self.victims.share(newcomer)
        if newcomer.timeline.scheduled_unix_ns or share == 1.0 or account.num_begun < share * self._context.max_running:
            return False
        return account.counter >= self._accounts[newcomer.service.rank].floor()

    def far_over_share(self, sequence: Sequence, view: BatchView) -> bool:
        """Return whether its tenant exceeds its share of blocks so far that its requests wait for each other."""
        held = view.tenant_blocks(sequence.request.tenant)
        return held > self._tuning.waits_for_itself_at * self.victims.share(sequence) * view.blocks_total

    def peak_fits(self, view: BatchView, candidate: Sequence) -> bool:
        """Return whether the predicted peak of the batch with the candidate fits its blocks.

        When one of the sequences ends, those that last longer have grown as much as it, and those before it are gone
        (Past-Future, arXiv 2507.10150). Requests of spot classes are preempted for others, so they count as gone.
        """
        layout, num_tokens, remaining = self._context.layout, len(candidate.tokens), candidate.remaining_output
        size, slots_for, each, is_plain = layout.block_size, layout.slots_for, layout.slots_per_token, layout.is_plain
        total = self._overcommit * view.blocks_total * size
        held = (view.blocks_total - view.blocks_free) * size + (num_tokens if is_plain else slots_for(num_tokens))
        if held + (view.remaining_output() + remaining) * each <= total:
            return True  # even if all ended together
        with_spot, held = candidate.service.spot, 0
        batch = [  # (`remaining_output`, tokens): written out, since it is computed for the whole batch
            (left if (left := s.predicted_output - len(s.tokens) + s.request.num_prompt) > 1.0 else 1.0, len(s.tokens))
            for s in view.peers
            if with_spot or not s.service.spot
        ]
        batch.append((remaining, num_tokens))
        batch.sort(reverse=True)
        for position, (left, num_tokens) in enumerate(batch, start=1):
            held += num_tokens if is_plain else slots_for(num_tokens)
            if held + left * position * each > total:
                self._held_back = True
                return position == 1
        return True

    def _predicted_peak(self, sequence: Sequence) -> int:
        high = self._context.lengths.high(
            sequence.request.tenant, self._tuning.reserve_quantile, at_most=sequence.request.submit.max_tokens
        )
        return sequence.request.num_prompt + max(high, sequence.request.num_resumed)

"""Admission to the batch by KV blocks: tenants' shares, predicted peaks, reservations and preemption victims."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moiety_engine.scheduling.fairness.tenant_counters import TenantCounter, TenantCounters
from moiety_engine.scheduling.policies.moiety.kv_reservations import KvReservations
from moiety_engine.scheduling.policies.moiety.request_record import AT_RISK, RequestRecords
from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_engine.scheduling.policies.policy import BatchView, PolicyContext
from moiety_engine.sequence import Sequence

_MEAN_S = 20.0
_LEARNING = 0.01  # change of the overcommitment per second, as a fraction of all blocks


@dataclass(frozen=True, slots=True)
class _Places:
    """Batch slots that a rank's requests hold."""

    held: Counter[TenantCounter]
    of_weight: float  # slots per unit of weight
    over: set[TenantCounter]  # tenants that hold at least their share of slots even with one slot less


class KvAdmission:
    """Decides by predictions, shares and reservations; takes no blocks itself."""

    def __init__(
        self, context: PolicyContext, tuning: Tuning, accounts: dict[int, TenantCounters], records: RequestRecords
    ) -> None:
        self._context = context
        self._tuning = tuning
        self._accounts = accounts  # by rank
        self._records = records
        self._guarantees = KvReservations(context.num_blocks, context.block_size)
        self._overcommit = 1.0  # predicted demand of the batch that is allowed, as a fraction of all blocks
        self._preemption_share = 0.0  # fraction of the time that preemptions cost; running mean
        self._held_back = False  # whether the predicted peak recently kept a request out of the batch
        self._places: dict[int, _Places] = {}  # by rank, as counted in this step
        self._sharing_s = 0.0  # time that may be spent on preemptions for tenants' shares

    def time_passed(self, seconds: float) -> None:
        tuning = self._tuning
        self._sharing_s = min(1.0, self._sharing_s + tuning.sharing_part * seconds)
        self._preemption_share *= 1 - min(1.0, seconds / _MEAN_S)
        low, high = tuning.overcommit_range
        if self._preemption_share > tuning.preemption_part:
            self._overcommit = max(low, self._overcommit - _LEARNING * seconds)
        elif self._held_back:
            self._overcommit = min(high, self._overcommit + _LEARNING * seconds)
        self._held_back = False

    def places_changed(self) -> None:
        """Discard the slot counts: a step begins, or a sequence joined or left the batch."""
        self._places.clear()

    def has_places_to_share(self, rank: int, running: Iterable[Sequence]) -> bool:
        """Return whether a tenant of the rank holds more than its share of slots."""
        return bool(self._places_of(rank, running).over)

    def preempted(self, sequence: Sequence, beneficiary: Sequence | None, cost_s: float) -> None:
        self.places_changed()
        self._preemption_share += cost_s / _MEAN_S
        if beneficiary is not None and beneficiary.service.rank == sequence.service.rank:
            self._sharing_s -= cost_s
        if sequence.timeline.num_preemptions >= self._tuning.max_preemptions:
            self._guarantees.owe(sequence)

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
            reserved_tokens = self._guarantees.reserved_tokens(candidate)
            return self._guarantees.can_join(candidate, max(self._predicted_peak(candidate), reserved_tokens))
        return candidate.timeline.num_preemptions < self._tuning.max_preemptions or self._guarantees.can_join(
            candidate, 0
        )

    def waiting_for_others(self, growing: list[Sequence]) -> list[Sequence]:
        """Return the sequences, of those that need one more block now, that must wait until others have ended."""
        return self._guarantees.waiting_for_others(growing)

    def over_share(self, sequence: Sequence, view: BatchView, num_blocks: int) -> bool:
        """Return whether its tenant would exceed its share of blocks with `num_blocks` more."""
        return view.tenant_blocks(sequence.request.tenant) + num_blocks > self._share(sequence) * view.blocks_total

    def has_its_places(self, newcomer: Sequence) -> bool:
        """Return whether its tenant holds its share of slots and has been served no less than the waiting tenants.

        Always False if the tenant is the only one of its rank, or if the sequence was scheduled before.
        """
        account = self._records[newcomer].tenant
        share = self._share(newcomer)
        if newcomer.timeline.scheduled_unix_ns or share == 1.0 or account.num_begun < share * self._context.max_running:
            return False
        return account.counter >= self._accounts[newcomer.service.rank].floor()

    def far_over_share(self, sequence: Sequence, view: BatchView) -> bool:
        """Return whether its tenant exceeds its share of blocks so far that its requests wait for each other."""
        held = view.tenant_blocks(sequence.request.tenant)
        return held > self._tuning.waits_for_itself_at * self._share(sequence) * view.blocks_total

    def peak_fits(self, view: BatchView, candidate: Sequence) -> bool:
        """Return whether the predicted peak of the batch with the candidate fits its blocks.

        When one of the sequences ends, those that last longer have grown as much as it, and those before it are gone
        (Past-Future, arXiv 2507.10150).
        """
        size = self._context.block_size
        total = self._overcommit * view.blocks_total * size
        held = (view.blocks_total - view.blocks_free) * size + len(candidate.tokens)
        if held + view.predicted_output() + candidate.predicted_output <= total:
            return True  # even if all ended together
        batch = [(s.predicted_output - len(s.tokens) + s.request.num_prompt, len(s.tokens)) for s in view.peers]
        batch.append((candidate.predicted_output - candidate.num_output, len(candidate.tokens)))
        batch.sort(reverse=True)
        held = 0
        for position, (left, num_tokens) in enumerate(batch, start=1):
            held += num_tokens
            if held + (left if left > 1.0 else 1.0) * position > total:
                self._held_back = True
                return position == 1
        return True

    def may_reclaim(self, sequence: Sequence, view: BatchView) -> bool:
        """Return whether sequences of its rank would be preempted for it.

        They hold more than their tenants' shares and its tenant holds little; it then joins although the batch's peak
        does not fit.
        """
        return bool(self._over_their_share(view.peers, sequence))

    # ── preemption ──

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, *, takes_blocks: bool
    ) -> list[Sequence]:
        """Return the sequences that may be preempted, the first victim first.

        The order is: lowest class, then demoted requests, then the latest deadline, then the fewest preemptions and
        pauses, then the smallest completed part of the predicted work, then the youngest. If only a batch slot is
        needed, the victim keeps its blocks. So a stream need not be at risk to take a slot from a worse rank, and
        sequences that were preempted as often as allowed may pause as well, after all others.
        """
        if beneficiary is None:
            batch = list(running)
        else:
            rank = beneficiary.service.rank
            outranks = self._records[beneficiary].bucket == AT_RISK or (
                not takes_blocks and beneficiary.service.ttft_s is not None
            )
            batch = [s for s in running if s.service.rank > rank] if outranks else []
            if takes_blocks:
                batch += self._over_their_share(running, beneficiary)
        protects, owes = self._guarantees.protects, self._guarantees.owes
        batch.sort(key=self._giving_way, reverse=True)
        victims = [s for s in batch if not protects(s)]
        if beneficiary is None or takes_blocks:
            return victims
        return victims + [s for s in batch if owes(s)] + self._over_their_places(running, beneficiary)

    def _over_their_places(self, running: Iterable[Sequence], beneficiary: Sequence) -> list[Sequence]:
        """Return sequences of the beneficiary's rank whose tenants hold at least their share of slots without them.

        Empty unless the beneficiary's tenant holds less than its own share. The order is the fewest pauses, then the
        youngest. A pause takes no blocks, so classes that are not preempted pause as well; a sequence that was
        preempted as often as allowed does not.
        """
        if not self._tuning.fairness or self._share(beneficiary) == 1.0:
            return []
        places = self._places_of(beneficiary.service.rank, running)
        own = self._records[beneficiary].tenant
        if not places.over or places.held[own] + 1 > max(1.0, places.of_weight * own.weight):
            return []
        records, over, owes = self._records, places.over, self._guarantees.owes
        may_pause = [s for s in running if records[s].tenant in over and not owes(s)]
        return sorted(may_pause, key=lambda s: (s.timeline.num_pauses, -s.request.order))

    def _places_of(self, rank: int, running: Iterable[Sequence]) -> _Places:
        """Count the rank's slots, once per step or until one changes its owner."""
        places = self._places.get(rank)
        if places is None:
            records = self._records
            held = Counter([records[s].tenant for s in running if s.service.rank == rank])
            of_weight = held.total() / max(1e-9, self._accounts[rank].total_weight)
            over = {account for account, count in held.items() if count - 1 >= max(1.0, of_weight * account.weight)}
            places = self._places[rank] = _Places(held, of_weight, over)
        return places

    def _over_their_share(self, running: Iterable[Sequence], beneficiary: Sequence) -> list[Sequence]:
        """Return sequences of the beneficiary's rank whose tenants hold their share of blocks without them.

        Empty unless the beneficiary's tenant will hold no more than its own share.
        """
        if not self._tuning.fairness or self._sharing_s <= 0:
            return []
        records, rank = self._records, beneficiary.service.rank
        own = records[beneficiary].tenant
        same = [s for s in running if s.service.rank == rank and s is not beneficiary]
        blocks: dict[TenantCounter, int] = {}
        for s in same:
            account = records[s].tenant
            blocks[account] = blocks.get(account, 0) + len(s.kv.blocks)
        each = self._context.num_blocks / max(1e-9, self._accounts[rank].total_weight)  # blocks per unit of weight
        wanted = -(-len(beneficiary.tokens) // self._context.block_size)
        if blocks.get(own, 0) + wanted > self._tuning.reclaims_up_to * each * own.weight:
            return []
        over = []
        for s in sorted(same, key=lambda s: -s.request.order):
            account = records[s].tenant
            left = blocks[account] - len(s.kv.blocks)
            if account is not own and not s.timeline.num_preemptions and left >= each * account.weight:
                over.append(s)
                blocks[account] = left
        return over

    def _share(self, sequence: Sequence) -> float:
        """Return the fraction of all blocks or slots that its tenant may hold while others of its rank need some."""
        account = self._records[sequence].tenant
        return account.weight / max(account.weight, self._accounts[sequence.service.rank].total_weight)

    def _predicted_peak(self, sequence: Sequence) -> int:
        high = self._context.lengths.high(
            sequence.request.tenant, self._tuning.reserve_quantile, at_most=sequence.request.submit.max_tokens
        )
        return sequence.request.num_prompt + max(high, sequence.request.num_resumed)

    def _giving_way(self, s: Sequence) -> tuple[int, bool, float, int, float, int]:
        """Return the sort key of victims; the largest is preempted first."""
        deadline_s = s.deadlines.completion_s if s.deadlines.due_s == math.inf else s.deadlines.due_s
        done = s.kv.num_computed / (s.request.num_prompt + max(s.predicted_output, s.num_output + 1.0))
        num_times = s.timeline.num_preemptions + s.timeline.num_pauses
        return s.service.rank, self._records[s].demoted, min(deadline_s, 1e18), -num_times, -done, s.request.order

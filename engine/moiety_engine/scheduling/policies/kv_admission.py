"""KvAdmission on blocks: who may join, whose share is full, who is protected and who gives way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moiety_engine.scheduling.policies.kv_reservations import KvReservations
from moiety_engine.scheduling.policies.tenant_counters import TenantCounter, TenantCounters
from moiety_engine.scheduling.policies.tuning import Tuning
from moiety_engine.scheduling.policies.urgency_queue import AT_RISK
from moiety_engine.scheduling.policy import BatchView, PolicyContext
from moiety_engine.sequence import Sequence

_MEAN_S = 20.0
_LEARNING = 0.01  # of all blocks a second, that overcommitment moves by


@dataclass(frozen=True, slots=True)
class _Places:
    """Places in the batch that a rank's requests hold."""

    held: Counter[TenantCounter]
    of_weight: float  # places that are the share of a unit of weight
    over: set[TenantCounter]  # tenants that hold their share without one of theirs


class KvAdmission:
    """Judges by predictions, shares and reservations; takes nothing itself."""

    def __init__(self, context: PolicyContext, tuning: Tuning, accounts: dict[int, TenantCounters]) -> None:
        self._context = context
        self._tuning = tuning
        self._accounts = accounts  # by rank
        self._guarantees = KvReservations(context.num_blocks, context.block_size)
        self._overcommit = 1.0  # of all blocks, that the batch may be predicted to want
        self._preemption_share = 0.0  # of the time, that preemptions cost; running mean
        self._held_back = False  # whether the predicted peak kept anybody from joining of late
        self._places: dict[int, _Places] = {}  # by rank, as counted in this step
        self._sharing_s = 0.0  # what may be spent on giving tenants their share

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
        """Count places anew: a step begins, or somebody joined or left the batch."""
        self._places.clear()

    def has_places_to_share(self, rank: int, running: Iterable[Sequence]) -> bool:
        """Return whether a tenant of the rank holds more than its share of places."""
        return bool(self._places_of(rank, running).over)

    def preempted(self, sequence: Sequence, beneficiary: Sequence | None, cost_s: float) -> None:
        self.places_changed()
        self._preemption_share += cost_s / _MEAN_S
        if beneficiary is not None and beneficiary.service.rank == sequence.service.rank:
            self._sharing_s -= cost_s
        if sequence.num_preemptions >= self._tuning.max_preemptions:
            self._guarantees.owe(sequence)

    def ended(self, sequence: Sequence) -> None:
        self._guarantees.forget(sequence)

    # ── joining ──

    def reserve(self, sequence: Sequence) -> None:
        """What the sequence may hold without losing its protection, if its class gives it any."""
        if not sequence.service.preemptible:
            self._guarantees.reserve(sequence, self._predicted_peak(sequence))

    def keeps_guarantees(self, joining: Sequence) -> bool:
        """Whether what is promised to those who are protected, and to the newcomer if it is one, can be kept."""
        if not joining.service.preemptible:
            return self._guarantees.can_join(joining, max(self._predicted_peak(joining), joining.reserved_tokens))
        return joining.num_preemptions < self._tuning.max_preemptions or self._guarantees.can_join(joining, 0)

    def waiting_for_others(self, growing: list[Sequence]) -> list[Sequence]:
        """Of those that need one more block now, who must wait until others have ended."""
        return self._guarantees.waiting_for_others(growing)

    def over_share(self, sequence: Sequence, view: BatchView, num_blocks: int) -> bool:
        """Whether its tenant would hold more than its share of blocks with so many more."""
        return view.tenant_blocks(sequence.tenant) + num_blocks > self._share(sequence) * view.blocks_total

    def has_its_places(self, newcomer: Sequence) -> bool:
        """Whether its tenant has its share of places in the batch and has not been served less than those that wait,
        while there are others."""
        account: TenantCounter = newcomer.account
        share = self._share(newcomer)
        if newcomer.scheduled_unix_ns or share == 1.0 or account.num_begun < share * self._context.max_running:
            return False
        return account.counter >= self._accounts[newcomer.service.rank].floor()

    def far_over_share(self, sequence: Sequence, view: BatchView) -> bool:
        """Whether its tenant holds so much more than its share of blocks that its requests wait for each other."""
        held = view.tenant_blocks(sequence.tenant)
        return held > self._tuning.waits_for_itself_at * self._share(sequence) * view.blocks_total

    def peak_fits(self, view: BatchView, joining: Sequence) -> bool:
        """Whether the batch with the newcomer finds its blocks at its predicted peak (Past-Future, 2507.10150): when
        one of the sequences ends, those that last longer have grown as much as it, and those before it are gone."""
        size = self._context.block_size
        total = self._overcommit * view.blocks_total * size
        held = (view.blocks_total - view.blocks_free) * size + len(joining.tokens)
        if held + view.predicted_output() + joining.predicted_output <= total:
            return True  # even if all of them ended together
        batch = [(s.predicted_output - len(s.tokens) + s.num_prompt, len(s.tokens)) for s in view.peers]
        batch.append((joining.predicted_output - joining.num_output, len(joining.tokens)))
        batch.sort(reverse=True)
        held = 0
        for position, (left, num_tokens) in enumerate(batch, start=1):
            held += num_tokens
            if held + (left if left > 1.0 else 1.0) * position > total:
                self._held_back = True
                return position == 1
        return True

    def may_reclaim(self, sequence: Sequence, view: BatchView) -> bool:
        """Whether others of its rank would give way to it, since they hold more than their share and its tenant little
        of its own: it joins though the batch's peak does not fit."""
        return bool(self._over_their_share(view.peers, sequence))

    # ── giving way ──

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, *, takes_blocks: bool
    ) -> list[Sequence]:
        """Who may be preempted, the first to go first: lowest class, then what cannot keep its promise, then the latest
        deadline, then what gave way least often, then what has done least of what it is predicted to do, then the
        youngest. For a mere place in the batch a stream need not be at risk to go before a worse rank, since the victim
        keeps its blocks; for the same reason what was preempted as often as allowed may pause, last of all."""
        if beneficiary is None:
            batch = list(running)
        else:
            rank = beneficiary.service.rank
            outranks = beneficiary.bucket == AT_RISK or (not takes_blocks and beneficiary.service.ttft_s is not None)
            batch = [s for s in running if s.service.rank > rank] if outranks else []
            if takes_blocks:
                batch += self._over_their_share(running, beneficiary)
        protects, owes = self._guarantees.protects, self._guarantees.owes
        batch.sort(key=_giving_way, reverse=True)
        victims = [s for s in batch if not protects(s)]
        if beneficiary is None or takes_blocks:
            return victims
        return victims + [s for s in batch if owes(s)] + self._over_their_places(running, beneficiary)

    def _over_their_places(self, running: Iterable[Sequence], beneficiary: Sequence) -> list[Sequence]:
        """Sequences of the beneficiary's rank whose tenants hold at least their share of the rank's places without
        them, while the beneficiary's tenant holds less than its own; those that paused least often first, then the
        youngest. A pause takes no blocks, so classes that are not preempted pause as well; a sequence that was
        preempted as often as allowed does not."""
        if not self._tuning.fairness or self._share(beneficiary) == 1.0:
            return []
        places = self._places_of(beneficiary.service.rank, running)
        own: TenantCounter = beneficiary.account
        if not places.over or places.held[own] + 1 > max(1.0, places.of_weight * own.weight):
            return []
        may_pause = (s for s in running if s.account in places.over and not self._guarantees.owes(s))
        return sorted(may_pause, key=lambda s: (s.num_pauses, -s.order))

    def _places_of(self, rank: int, running: Iterable[Sequence]) -> _Places:
        """Count the rank's places, once a step or until one changes hands."""
        places = self._places.get(rank)
        if places is None:
            held = Counter(s.account for s in running if s.service.rank == rank)
            of_weight = held.total() / max(1e-9, self._accounts[rank].total_weight)
            over = {account for account, count in held.items() if count - 1 >= max(1.0, of_weight * account.weight)}
            places = self._places[rank] = _Places(held, of_weight, over)
        return places

    def _over_their_share(self, running: Iterable[Sequence], beneficiary: Sequence) -> list[Sequence]:
        """Sequences of the beneficiary's rank whose tenants hold their share of blocks without them, while the
        beneficiary's will hold no more than its own."""
        if not self._tuning.fairness or self._sharing_s <= 0:
            return []
        rank, own = beneficiary.service.rank, beneficiary.account
        same = [s for s in running if s.service.rank == rank and s is not beneficiary]
        blocks: dict[TenantCounter, int] = {}
        for s in same:
            blocks[s.account] = blocks.get(s.account, 0) + len(s.blocks)
        each = self._context.num_blocks / max(1e-9, self._accounts[rank].total_weight)  # a unit of weight
        wanted = -(-len(beneficiary.tokens) // self._context.block_size)
        if blocks.get(own, 0) + wanted > self._tuning.reclaims_up_to * each * own.weight:
            return []
        over = []
        for s in sorted(same, key=lambda s: -s.order):
            account: TenantCounter = s.account
            left = blocks[account] - len(s.blocks)
            if account is not own and not s.num_preemptions and left >= each * account.weight:
                over.append(s)
                blocks[account] = left
        return over

    def _share(self, sequence: Sequence) -> float:
        """Of all blocks or places, that its tenant may hold while others of its rank want some."""
        account: TenantCounter = sequence.account
        return account.weight / max(account.weight, self._accounts[sequence.service.rank].total_weight)

    def _predicted_peak(self, sequence: Sequence) -> int:
        high = self._context.lengths.high(
            sequence.tenant, self._tuning.reserve_quantile, at_most=sequence.submit.max_tokens
        )
        return sequence.num_prompt + max(high, sequence.num_resumed)


def _giving_way(s: Sequence) -> tuple[int, bool, float, int, float, int]:
    deadline_s = s.completion_deadline_s if s.due_s == math.inf else s.due_s
    done = s.num_computed / (s.num_prompt + max(s.predicted_output, s.num_output + 1.0))
    num_times = s.num_preemptions + s.num_pauses
    return s.service.rank, s.demoted, min(deadline_s, 1e18), -num_times, -done, s.order

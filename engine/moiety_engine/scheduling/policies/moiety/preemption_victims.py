"""Preemption victims of the Moiety policy: the order in which running sequences give up blocks or a batch slot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from moiety_engine.scheduling.fairness.tenant_counters import TenantCounter, TenantCounters
from moiety_engine.scheduling.policies.moiety.kv_reservations import KvReservations
from moiety_engine.scheduling.policies.moiety.request_record import AT_RISK, RequestRecords
from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_engine.scheduling.policies.policy_interface import BatchView, PolicyContext
from moiety_engine.sequence import Sequence


class _BatchSlots(NamedTuple):
    """Batch slots that a rank's requests hold."""

    held: Mapping[str, int]  # by tenant
    of_weight: float  # slots per unit of weight
    over_share: set[TenantCounter]  # tenants that hold at least their share of slots even with one slot less


class PreemptionVictims:
    """Chooses victims by class, deadline and tenants' shares; preempts nothing itself."""

    def __init__(
        self,
        context: PolicyContext,
        tuning: Tuning,
        accounts: dict[int, TenantCounters],
        records: RequestRecords,
        reservations: KvReservations,
    ) -> None:
        self._context = context
        self._tuning = tuning
        self._accounts = accounts  # by rank
        self._records = records
        self._reservations = reservations
        self._slots: dict[int, _BatchSlots] = {}  # by rank, as counted in this step
        self._sharing_s = 0.0  # time that may be spent on preemptions for tenants' shares

    def time_passed(self, seconds: float) -> None:
        self._sharing_s = min(1.0, self._sharing_s + self._tuning.sharing_part * seconds)

    def preempted(self, sequence: Sequence, beneficiary: Sequence | None, cost_s: float) -> None:
        """Record a preemption and its cost in seconds."""
        self.slots_changed()
        if beneficiary is not None and beneficiary.service.rank == sequence.service.rank:
            self._sharing_s -= cost_s

    def slots_changed(self) -> None:
        """Discard the slot counts: a step begins, or a sequence joined or left the batch."""
        self._slots.clear()

    def some_tenant_exceeds_slots(self, rank: int) -> bool:
        """Return whether a tenant of the rank holds more than its share of batch slots."""
        return bool(self._slots_of(rank).over_share)

    def may_reclaim(self, sequence: Sequence, view: BatchView) -> bool:
        """Return whether sequences of its rank would be preempted for it.

        They hold more than their tenants' shares and its tenant holds little; it then joins although the batch's peak
        does not fit.
        """
        return bool(self._over_their_share(view.peers, sequence))

    def ordered(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, *, takes_blocks: bool
    ) -> list[Sequence]:
        """Return the sequences that may be preempted, the first victim first.

        The order is: lowest class, then demoted requests, then the latest deadline, then the fewest preemptions and
        pauses, then the smallest completed part of the predicted work, then the youngest. If only a batch slot is
        needed, the victim keeps its blocks. So a stream need not be at risk to take a slot from a worse rank, and
        sequences that were preempted as often as allowed may pause as well, after all others. Sequences of spot classes
        are victims for every better rank.
        """
        worst_rank = self._context.running.worst_rank
        if beneficiary is not None and not takes_blocks and worst_rank <= beneficiary.service.rank:
            return self._over_their_slots(running, beneficiary)  # the usual case in a full batch
        batch = list(running) if beneficiary is None else self._of_worse_ranks(running, beneficiary, takes_blocks)
        if beneficiary is not None and takes_blocks:
            batch += self._over_their_share(running, beneficiary)
        protects, is_guaranteed = self._reservations.protects, self._reservations.is_guaranteed
        batch.sort(key=self._victim_key, reverse=True)
        victims = [s for s in batch if not protects(s)]
        if beneficiary is None or takes_blocks:
            return victims
        return victims + [s for s in batch if is_guaranteed(s)] + self._over_their_slots(running, beneficiary)

    def _of_worse_ranks(self, running: Iterable[Sequence], beneficiary: Sequence, takes_blocks: bool) -> list[Sequence]:
        """Return the sequences of worse ranks that give way to the beneficiary."""
        rank = beneficiary.service.rank
        if self._context.running.worst_rank <= rank:
            return []
        outranks = self._records[beneficiary].bucket == AT_RISK or (
            not takes_blocks and beneficiary.service.ttft_s is not None
        )
        return [s for s in running if s.service.rank > rank and (outranks or s.service.spot)]

    def _over_their_slots(self, running: Iterable[Sequence], beneficiary: Sequence) -> list[Sequence]:
        """Return sequences of the beneficiary's rank whose tenants hold at least their share of slots without them.

        Empty unless the beneficiary's tenant holds less than its own share. With service on other replicas, a tenant
        takes no slot from one with a lower counter, which was served less. The order is the fewest pauses, then the
        youngest. A pause takes no blocks, so classes that are not preempted pause as well; a sequence that was
        preempted as often as allowed does not.
        """
        if not self._tuning.fairness:
            return []
        own, rank = self._records[beneficiary].tenant, beneficiary.service.rank
        accounts = self._accounts[rank]
        if own.weight >= accounts.total_weight:
            return []  # its tenant is the only one
        slots = self._slots_of(rank)
        num_held = slots.held.get(own.tenant)
        if num_held and num_held + 1 > slots.of_weight * own.weight:
            return []
        over = slots.over_share
        if accounts.has_remote_service:
            over = {one for one in over if one.counter >= own.counter}
        if not over:
            return []
        records, is_guaranteed = self._records, self._reservations.is_guaranteed
        may_pause = [s for s in running if records[s].tenant in over and not is_guaranteed(s)]
        return sorted(may_pause, key=lambda s: (s.timeline.num_pauses, -s.request.order))

    def _slots_of(self, rank: int) -> _BatchSlots:
        """Compare the rank's slots with the shares, once per step or until one changes its owner.

        Only used with fairness between tenants, so that each has an account.
        """
        slots = self._slots.get(rank)
        if slots is None:
            accounts = self._accounts[rank]
            num_running, held, several = self._context.running.of_rank(rank)
            of_weight = num_running / max(1e-9, accounts.total_weight)
            over_share = set[TenantCounter]()
            for tenant, count in several.items():
                account = accounts.get(tenant)
                if account is not None and count - 1 >= of_weight * account.weight:
                    over_share.add(account)
            slots = self._slots[rank] = _BatchSlots(held, of_weight, over_share)
        return slots

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
            blocks[account] = blocks.get(account, 0) + s.kv.num_held
        each = self._context.num_blocks / max(1e-9, self._accounts[rank].total_weight)  # blocks per unit of weight
        wanted = self._context.layout.held_for(len(beneficiary.tokens))
        if blocks.get(own, 0) + wanted > self._tuning.reclaims_up_to * each * own.weight:
            return []
        over = []
        for s in sorted(same, key=lambda s: -s.request.order):
            account = records[s].tenant
            left = blocks[account] - s.kv.num_held
            if account is not own and not s.timeline.num_preemptions and left >= each * account.weight:
                over.append(s)
                blocks[account] = left
        return over

    def share(self, sequence: Sequence) -> float:
        """Return the fraction of all blocks or slots that its tenant may hold while others of its rank need some."""
        account = self._records[sequence].tenant
        return account.weight / max(account.weight, self._accounts[sequence.service.rank].total_weight)

    def _victim_key(self, s: Sequence) -> tuple[int, bool, float, int, float, int]:
        """Return the sort key of victims; the largest is preempted first."""
        deadline_s = s.deadlines.completion_s if s.deadlines.due_s == math.inf else s.deadlines.due_s
        done = s.kv.num_computed / (s.request.num_prompt + max(s.predicted_output, s.num_output + 1.0))
        num_times = s.timeline.num_preemptions + s.timeline.num_pauses
        return s.service.rank, self._records[s].demoted, min(deadline_s, 1e18), -num_times, -done, s.request.order

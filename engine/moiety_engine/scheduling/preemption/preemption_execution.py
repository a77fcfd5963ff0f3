"""Preemption: which blocks are given up in the order of the policy, and whether KV is swapped out or recomputed.

Blocks come first from sequences outside the batch, paused before returning and the youngest first; then from running
sequences, in the policy's order of victims. Computed KV is swapped out to the host tier if copying it out and back is
predicted to take less time than recomputing it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.scheduling.scheduler_state import SchedulerState
from moiety_engine.scheduling.step_planner import StepPlanner
from moiety_engine.scheduling.step_time.step_time_model import StepShape
from moiety_engine.sequence import Sequence
from moiety_wire.trace_events import EventKind, Reason


@dataclass(frozen=True, slots=True)
class SwapCost:
    """Measured cost of copying a block, and all states of a sequence, between device and host memory."""

    seconds_per_block: float = 0.0
    seconds_per_state: float = 0.0


class Preemptor:
    """Takes blocks from sequences. Keeps the sequences that were preempted in the step being planned."""

    def __init__(self, state: SchedulerState, swap: SwapCost) -> None:
        self._kv, self._queues, self._step_time = state.kv, state.queues, state.step_time
        self._policy, self._tally = state.policy, state.tally
        self.swap = swap
        self.preempted: list[Sequence] = []

    def reclaim(self, num_blocks: int, kv: KvLedger, *, with_state: bool = False) -> bool:
        """Free blocks of a ledger until `num_blocks` are free, by taking those of sequences outside the batch.

        `with_state`: a state slot is freed too, if the model has recurrent states. Return False if all of these
        sequences together hold too few.
        """
        pool = kv.pool
        if pool.num_free >= num_blocks and (not with_state or kv.has_state_slot):
            return True
        for holders in (self._queues.paused, self._queues.returning):
            for sequence in reversed(holders):
                if sequence.kv.is_on_device and self._kv.of(sequence) is kv:
                    self._take_blocks(sequence)
                    if pool.num_free >= num_blocks and (not with_state or kv.has_state_slot):
                        return True
        return False

    def secure_decodes(self, now_ns: int) -> list[Chunk]:
        """Return the decode rows of this step, each with a block for its next token.

        Other decoding sequences stay out of the step or are preempted.
        """
        decoding, size = self._queues.decoding, self._kv.first.block_size
        short = [s for s in self._queues.filled if (kv := s.kv).num_computed >= len(kv.blocks) * size and s in decoding]
        waiting: list[Sequence] = []
        for ledger in self._kv.ledgers if short else ():
            of_group = short if self._kv.count == 1 else [s for s in short if self._kv.of(s) is ledger]
            waiting += self._give_blocks(of_group, ledger, now_ns) if of_group else []
        self._queues.filled = dict.fromkeys(waiting)
        if waiting:
            return [chunk for s, chunk in decoding.items() if s not in waiting]
        return list(decoding.values())

    def free_for(self, beneficiary: Sequence, num_blocks: int, planner: StepPlanner, now_ns: int) -> bool:
        """Preempt running sequences for an urgent one until `num_blocks` blocks are free. All or nothing."""
        pool = self._kv.of(beneficiary).pool
        chosen = []
        gained = pool.num_free
        for victim in self._policy.victims(self.peers(beneficiary.kv.group), beneficiary, now_ns / 1e9):
            if gained >= num_blocks:
                break
            if self._may_go(victim, planner):
                chosen.append(victim)
                gained += self._would_free(victim)
        if gained < num_blocks:
            return False
        for victim in chosen:
            planner.drop_decode(victim)
            self.preempt(victim, _why(victim, beneficiary), now_ns, beneficiary, take_blocks=True)
        return pool.num_free >= num_blocks

    def place_victim(self, beneficiary: Sequence, planner: StepPlanner, now_ns: int) -> Sequence | None:
        """Return the running sequence that would leave a full batch for the beneficiary; None if there is none.

        It has a worse rank, or the same rank and a tenant that holds more than its share of batch slots.
        """
        victims = self._policy.victims(self._queues.running, beneficiary, now_ns / 1e9, takes_blocks=False)
        return next((victim for victim in victims if self._may_go(victim, planner)), None) if victims else None

    def take_place(self, victim: Sequence, beneficiary: Sequence, planner: StepPlanner, now_ns: int) -> None:
        """Take the victim out of the batch. It keeps its blocks until another sequence needs them."""
        planner.drop_decode(victim)
        same_rank = victim.service.rank == beneficiary.service.rank
        reason = Reason.OVER_SHARE if same_rank else Reason.BATCH_FULL
        self.preempt(victim, reason, now_ns, beneficiary, take_blocks=False)

    def break_deadlock(self, now_ns: int, group: int | None = None) -> bool:
        """Preempt the youngest of several half-filled sequences that hold all blocks, so that the others can end."""
        holders = [s for s in self._queues.running if s.kv.blocks and group in (None, s.kv.group)]
        num_of = Counter(s.kv.group for s in holders)
        holders = [s for s in holders if num_of[s.kv.group] > 1]
        if not holders:
            return False
        victims = self._policy.victims(holders, None, now_ns / 1e9) or sorted(holders, key=lambda s: -s.request.order)
        self.preempt(victims[0], Reason.DECODE_NEEDS_BLOCKS, now_ns, None, take_blocks=True)
        return True

    def free_stuck_groups(self, planner: StepPlanner, running: Iterable[Plan], now_ns: int) -> None:
        """Preempt in each idle group whose sequences hold all of its blocks, so that it continues in the next step."""
        if self._kv.count == 1 or planner.rows_left <= 0:
            return
        busy = planner.groups | {chunk.sequence.kv.group for plan in running for chunk in plan.chunks}
        for group, kv in enumerate(self._kv):
            if group not in busy and kv.pool.num_free < kv.num_tables:
                self.break_deadlock(now_ns, group)

    def preempt(
        self, victim: Sequence, reason: Reason, now_ns: int, beneficiary: Sequence | None, *, take_blocks: bool
    ) -> None:
        """Take a running sequence out of the batch; it returns to its old position in the queue."""
        cost_s = self._cost_s(victim) if take_blocks else 0.0
        if take_blocks:
            self._take_blocks(victim)
        if victim.padded_row.is_finished:
            self._kv.of(victim).release(victim)
            self._queues.end(victim)
            return
        if take_blocks:
            victim.timeline.num_preemptions += 1
        else:
            victim.timeline.num_pauses += 1
        self._policy.preempted(victim, beneficiary, cost_s)
        victim.timeline.note(now_ns, EventKind.PREEMPTED, reason, beneficiary.key if beneficiary else 0)
        tally = self._tally.of(victim.service.name)
        tally.preempted[reason.value] += 1
        tally.num_running -= 1
        tally.num_waiting += 1
        self._queues.queue_for_return(victim)
        self._policy.push(victim, now_ns / 1e9)
        self.preempted.append(victim)

    def peers(self, group: int) -> list[Sequence]:
        """Return the running sequences that hold blocks in the group."""
        running = self._queues.running
        return running if self._kv.count == 1 else [s for s in running if s.kv.group == group]

    def _give_blocks(self, short: list[Sequence], kv: KvLedger, now_ns: int) -> list[Sequence]:
        """Allocate one more block for each sequence, as far as possible, and return the sequences without one."""
        pool = kv.pool
        waiting = self._policy.waiting_for_others(short)
        if waiting:
            short = [s for s in short if s not in waiting]
        if len(short) * kv.num_tables > pool.num_free and not self.reclaim(len(short) * kv.num_tables, kv):
            self._free_for_decodes(short, kv, now_ns)
        served = pool.num_free // kv.num_tables
        if len(short) > served:
            short.sort(key=_first_served)
            waiting = waiting + short[served:]
            del short[served:]
        kv.grow_each(short)
        return waiting

    def _free_for_decodes(self, short: list[Sequence], kv: KvLedger, now_ns: int) -> None:
        """Preempt until the remaining decodes have their blocks or no more sequences may be preempted."""
        pool, group = kv.pool, short[0].kv.group
        for victim in self._policy.victims(list(self.peers(group)), None, now_ns / 1e9):
            if len(short) * kv.num_tables <= pool.num_free or self._num_decoding(group) < 2:
                break
            if victim in self._queues.verifying:
                continue
            self.preempt(victim, Reason.DECODE_NEEDS_BLOCKS, now_ns, None, take_blocks=True)
            if victim in short:
                short.remove(victim)

    def _num_decoding(self, group: int) -> int:
        decoding = self._queues.decoding
        return len(decoding) if self._kv.count == 1 else sum(s.kv.group == group for s in decoding)

    def _take_blocks(self, sequence: Sequence) -> None:
        kv = self._kv.of(sequence)
        if self._swap_is_cheaper(sequence):
            kv.swap_out(sequence)
        else:
            kv.release(sequence)

    def _swap_is_cheaper(self, sequence: Sequence) -> bool:
        return self._kv.of(sequence).can_swap_out(sequence) and self._swap_s(sequence) < self._recompute_s(sequence)

    def _cost_s(self, sequence: Sequence) -> float:
        """Return the predicted total time to take the sequence's blocks and to restore their contents."""
        again_s = self._recompute_s(sequence)
        return min(again_s, self._swap_s(sequence)) if self._kv.of(sequence).can_swap_out(sequence) else again_s

    def _swap_s(self, sequence: Sequence) -> float:
        kv = self._kv.of(sequence)
        out = kv.num_to_copy_out(sequence)
        back = kv.num_computed_blocks(sequence)
        return (out + back) * self.swap.seconds_per_block + 2 * self.swap.seconds_per_state

    def _recompute_s(self, sequence: Sequence) -> float:
        empty = StepShape()
        again = empty.with_prefill(sequence.kv.num_computed, 0)
        return self._step_time.predict_s(again) - self._step_time.predict_s(empty)

    def _may_go(self, victim: Sequence, planner: StepPlanner) -> bool:
        """Return False if this step computes the victim's prompt, or it waits for the result of a running step."""
        return not planner.prefills(victim) and victim not in self._queues.verifying

    def _would_free(self, sequence: Sequence) -> int:
        return self._kv.of(sequence).num_unshared(sequence)


def _why(victim: Sequence, beneficiary: Sequence) -> Reason:
    """Return the reason for a preemption: the tenant's share within a rank, urgency between ranks."""
    same_rank = victim.service.rank == beneficiary.service.rank
    return Reason.OVER_SHARE if same_rank else Reason.URGENT_NEEDS_BLOCKS


def _first_served(sequence: Sequence) -> tuple[int, int]:
    return sequence.service.rank, sequence.request.order

"""Prefill planning: fills a step with prefill in the policy's order, as far as rows, time and blocks allow.

A sequence remembers why it could not join. A sequence without blocks lets others pass only where the policy allows it;
a sequence that waits for a prefix which this step computes always does. The plan does not need the sequences that were
examined in vain any longer: `requeue_examined` queues them again after the launch. If the batch is full and no further
sequence can get a place in it, those that the plan would examine in vain are examined then as well.
"""

from __future__ import annotations

from enum import Enum, auto

from moiety_engine.scheduling.kv.prefix_search import PrefixHits
from moiety_engine.scheduling.policies.policy_interface import BatchView
from moiety_engine.scheduling.preemption.preemption_execution import Preemptor
from moiety_engine.scheduling.queues.request_queues import by_arrival
from moiety_engine.scheduling.scheduler_state import SchedulerState
from moiety_engine.scheduling.speculative_prefill.speculative_prefill import SpeculativePrefill
from moiety_engine.scheduling.step_planner import StepPlanner
from moiety_engine.sequence import Sequence, SequenceState
from moiety_wire.trace_events import EventKind, Reason

MAX_EXAMINED = 24  # sequences that one step may examine in vain


class _Given(Enum):
    """Result of giving a sequence a part of a step."""

    ALL = auto()  # its tokens are complete with this step
    SOME = auto()
    NOTHING = auto()  # there is no time or no block for a single token


class PrefillPlanner:
    """Fills one step after the other with prefill."""

    def __init__(
        self,
        state: SchedulerState,
        preemptor: Preemptor,
        speculative_prefill: SpeculativePrefill,
        *,
        waits_for_tokens: bool = False,
    ) -> None:
        """Create the planner. With `waits_for_tokens`, no sequence is planned whose newest token is not known."""
        self._waits_for_tokens = waits_for_tokens
        self._kv, self._queues, self._encoder_work = state.kv, state.queues, state.encoder_work
        self._policy, self._tally = state.policy, state.tally
        self._preemptor, self._speculative_prefill = preemptor, speculative_prefill
        self.examined: list[Sequence] = []  # in vain, by the newest plan, and not queued again yet
        self._examined_s = 0.0
        self._may_stop_early = False  # whether the plan has not asked yet if the full batch is final
        self.stopped_early = False  # the newest plan left the rest of its search to `requeue_examined`
        self.cached_tokens_total = 0
        self.prompt_tokens_total = 0

    def fill(self, planner: StepPlanner, view: BatchView, joinable: int, now_ns: int) -> None:
        """Add prefill of running sequences, and of up to `joinable` sequences that join the batch."""
        now_s, pop = now_ns / 1e9, self._policy.pop
        self.requeue_examined()
        deferred: list[Sequence] = []
        blocked: list[Sequence] = []
        full: set[int] = set()  # groups that get no more in this step
        closed: set[int] = set()  # groups that no further sequence may join
        some_wait = self._waits_for_tokens or self._kv.count > 1
        self._may_stop_early = not some_wait
        rows_left = planner.prefill_rows_left  # at most: what a sequence without a place leaves free is not counted
        while rows_left > 0 and len(deferred) < MAX_EXAMINED:
            stops_early = joinable <= 0 and self._may_stop_early and self._stop_early(deferred)
            sequence = None if stops_early else pop(now_s)
            if sequence is None:
                break
            reason = None
            if some_wait and self._must_wait(sequence, full, closed):
                deferred.append(sequence)
                continue
            if sequence.state is not SequenceState.RUNNING:
                reason = self._join(sequence, planner, view, joinable, now_ns)
                if reason is None:
                    joinable -= 1
                    for other in blocked:
                        other.timeline.num_overtaken += 1
            if reason is not None:
                sequence.timeline.delay = reason
                deferred.append(sequence)
                if reason is Reason.NO_BLOCKS:
                    view.lacks_blocks = True
                    blocked.append(sequence)
                if self._ends_the_search(reason, sequence, view, now_s, closed, is_full=joinable <= 0):
                    break
                continue
            given = self._advance(sequence, planner)
            rows_left = planner.prefill_rows_left
            if given is not _Given.ALL:
                deferred.append(sequence)
            if given is _Given.NOTHING and self._fills_the_last(sequence.kv.group, full):
                break
        self._requeue_later(deferred, now_s)
        if rows_left > 0 and len(full) < self._kv.count:
            self.continue_prefills(planner, now_s)

    def fill_empty(self, planner: StepPlanner, now_s: float) -> None:
        """Lift the limit of worse ranks in a step that would be empty, and decode what gave way to waiting requests.

        Call it if no step is running, so that nothing would be computed until the next one. A prompt of a worse rank
        then has the place in the batch that the best rank waits for.
        """
        if planner.lift_rank_limit():
            self.continue_prefills(planner, now_s)
        if planner.empty:
            waiting, decoding = self._queues.filled, self._queues.decoding
            held = [chunk for sequence, chunk in decoding.items() if sequence not in waiting][: planner.rows_left]
            planner.add_decodes(held, sum(chunk.sequence.kv.num_computed for chunk in held))

    def continue_prefills(self, planner: StepPlanner, now_s: float) -> None:
        """Add prefill of sequences that are already in the batch, regardless of the policy's queue before them."""
        going = [s for s in self._queues.prefilling if s.entry & 1 and not planner.prefills(s)]
        if not going:
            return
        self.requeue_examined()
        if not planner.empty:
            going = [s for s in going if not self._policy.gives_way(s)]
        full: set[int] = set()
        for sequence in sorted(going, key=by_arrival):
            if sequence.kv.group in full:
                continue
            self._policy.discard(sequence)
            given = self._advance(sequence, planner)
            if given is not _Given.ALL:
                self._policy.push(sequence, now_s)
            if given is _Given.NOTHING and self._fills_the_last(sequence.kv.group, full):
                break
            if planner.prefill_rows_left <= 0:
                break

    def _must_wait(self, sequence: Sequence, full: set[int], closed: set[int]) -> bool:
        """Return whether the sequence's newest token is not known yet, or its group takes no more in this step.

        A sequence without blocks is assigned to the best group first.
        """
        if self._waits_for_tokens and sequence.pending:
            return True
        if self._kv.count == 1:
            return False
        shut = full if sequence.state is SequenceState.RUNNING else full | closed
        if not sequence.kv.holds_blocks and len(shut) < self._kv.count:
            self._kv.choose(sequence, self._queues.running, shut)
        return sequence.kv.group in shut

    def _fills_the_last(self, group: int, full: set[int]) -> bool:
        """Mark the group as full for this step. Return whether all groups are full."""
        full.add(group)
        return len(full) == self._kv.count

    def _ends_the_search(
        self, reason: Reason, sequence: Sequence, view: BatchView, now_s: float, closed: set[int], *, is_full: bool
    ) -> bool:
        """Return whether no later sequence can join either.

        That is the case if no batch slot is left, or if this sequence must not be overtaken. A sequence that holds
        blocks in one group is not overtaken by those that join another group.
        """
        if reason is Reason.NO_BLOCKS:
            if self._policy.may_overtake(sequence, view, now_s):
                return False
            closed.add(sequence.kv.group)
            return not sequence.kv.holds_blocks or len(closed) == self._kv.count
        if reason is not Reason.BATCH_FULL:
            return False
        return not (is_full and self._policy.looks_past_full_batch(sequence, view.running))

    def mark_started(self, sequence: Sequence, now_ns: int) -> None:
        """Put a sequence into the batch and count it as started or resumed."""
        tally, timeline, kv = self._tally.of(sequence.service.name), sequence.timeline, sequence.kv
        tally.num_waiting -= 1
        tally.num_running += 1
        self._queues.run(sequence)
        if timeline.scheduled_unix_ns == 0:
            timeline.scheduled_unix_ns = now_ns
            num_prompt, num_landed = sequence.request.num_prompt, kv.num_landed
            kv.num_cached = min(kv.num_computed - num_landed, num_prompt)
            if self._speculative_prefill.is_used:
                self._speculative_prefill.joined(sequence, now_ns)
            self.cached_tokens_total += kv.num_cached
            self.prompt_tokens_total += num_prompt - min(num_landed, num_prompt)
            if timeline.delay is not None:
                timeline.note(now_ns, EventKind.DELAYED, timeline.delay)
            num_uncomputed, images = len(sequence.tokens) - kv.num_computed, sequence.request.images
            if images is not None:
                num_uncomputed += self._encoder_work.cost_from(images, kv.num_computed)
            self._policy.started(sequence, num_uncomputed, now_ns / 1e9)
        elif timeline.num_preemptions or timeline.num_pauses:
            again = Reason.RECOMPUTE if kv.num_computed < kv.peak_computed else Reason.SWAP
            timeline.note(now_ns, EventKind.RESUMED, again)
        timeline.delay = None

    def requeue_examined(self) -> None:
        """Queue the sequences again that the newest plan examined in vain, unless that was done.

        Call it after the plan, before any other change of the queues.
        """
        if self.stopped_early:
            self._examine_the_rest()
        if self.examined:
            examined, self.examined = self.examined, []
            self.put_back(examined, self._examined_s)

    def _stop_early(self, deferred: list[Sequence]) -> bool:
        """Leave the rest of the search to `requeue_examined` if it cannot change the step. Return whether it is left.

        It cannot if no queued sequence is in the full batch or would get a place in it.
        """
        self._may_stop_early = False
        if self._queues.verifying:
            return False
        for sequence in self._queues.prefilling:
            if sequence.entry & 1:
                return False
        running = SequenceState.RUNNING
        for sequence in deferred:
            if sequence.state is running:
                return False
        self.stopped_early = self._policy.full_batch_is_final()
        return self.stopped_early

    def _examine_the_rest(self) -> None:
        """Examine the sequences that the newest plan would have examined in vain, and note why they cannot join."""
        self.stopped_early, now_s = False, self._examined_s
        while len(self.examined) < MAX_EXAMINED and (sequence := self._policy.pop(now_s)) is not None:
            sequence.timeline.delay = Reason.BATCH_FULL
            self.examined.append(sequence)
            if not self._policy.looks_past_full_batch(sequence, self._queues.running):
                break

    def _requeue_later(self, sequences: list[Sequence], now_s: float) -> None:
        """Let `requeue_examined` queue the sequences: at once if any is running, since it can get more of this step."""
        self.examined, self._examined_s = sequences, now_s
        running = SequenceState.RUNNING
        for sequence in sequences:
            if sequence.state is running:
                self.requeue_examined()
                return

    def put_back(self, sequences: list[Sequence], now_s: float) -> None:
        """Queue sequences again that need more prefill."""
        for sequence in sequences:
            if (
                sequence.state is not SequenceState.ENDED and sequence not in self._queues.decoding
            ):  # decoding sequences are not queued
                self._policy.push(sequence, now_s)

    def take_blocks(self, sequence: Sequence, num_tokens: int, hits: PrefixHits | None) -> bool:
        """Give a joining sequence its KV: kept blocks, swapped-out blocks, or prefix hits (searched if None).

        Return False, with nothing taken, if too few blocks are free.
        """
        state = sequence.kv
        kv = self._kv.ledgers[state.group]
        if state.is_on_device:
            return True  # it kept its blocks, and grows with each chunk
        if state.host_blocks:
            return kv.swap_in(sequence, num_tokens)
        if not kv.start(sequence, kv.find_prefix(sequence) if hits is None else hits, num_tokens):
            return False
        if state.num_transferred_tokens:
            kv.queue_kv_load(sequence)
        return True

    def _advance(self, sequence: Sequence, planner: StepPlanner) -> _Given:
        """Give the sequence its part of this step."""
        limit = planner.max_prefill_tokens(sequence)
        if limit <= 0:
            return _Given.NOTHING
        kv = self._kv.ledgers[sequence.kv.group]
        num_new = kv.num_to_grow(sequence, sequence.kv.num_computed + limit)
        if num_new > kv.pool.num_free:
            self._preemptor.reclaim(num_new, kv)
        if planner.add_prefill(sequence, limit):
            return _Given.ALL
        return _Given.SOME if planner.prefills(sequence) else _Given.NOTHING

    def _join(
        self, sequence: Sequence, planner: StepPlanner, view: BatchView, joinable: int, now_ns: int
    ) -> Reason | None:
        """Put a sequence into the batch, with prefix hits or its earlier KV; return the reason if it cannot join."""
        now_s = now_ns / 1e9
        victim = None
        if joinable <= 0 and (victim := self._preemptor.place_victim(sequence, planner, now_ns)) is None:
            return Reason.BATCH_FULL
        num_tokens, state = len(sequence.tokens), sequence.kv
        kv = self._kv.ledgers[state.group]
        hits: PrefixHits | None = None
        if state.is_on_device:
            num_new = kv.num_to_complete(sequence, num_tokens)
        elif state.host_blocks:
            num_new = kv.num_blocks_to_swap_in(sequence, num_tokens)
        else:
            hits = kv.find_prefix(sequence)
            if planner.completes_blocks and not state.num_transferred_tokens:
                next_hash = kv.next_hash(sequence, hits.num_blocks)
                if planner.will_compute(next_hash, hits.num_blocks, state.group):
                    return Reason.SHARED_PREFIX
            num_new = kv.num_blocks_to_start(hits, num_tokens)
        view.blocks_free = kv.pool.num_free
        if self._kv.count > 1:
            view.select_group(self._preemptor.peers(state.group), view.blocks_free)
        view.shape = planner.shape
        view.worst_rank = self._queues.counts.worst_rank
        reason = self._policy.delays(sequence, view, num_new, now_s)
        if reason is not None:
            return reason
        if victim is not None:
            self._preemptor.take_place(victim, sequence, planner, now_ns)
        if not self.take_blocks(sequence, num_tokens, hits) and not self._preempt_for(
            sequence, num_new, planner, now_ns
        ):
            return Reason.NO_BLOCKS
        view.blocks_of_tenant = None
        self.mark_started(sequence, now_ns)
        return None

    def _preempt_for(self, sequence: Sequence, num_blocks: int, planner: StepPlanner, now_ns: int) -> bool:
        """Preempt other sequences until the sequence has its blocks. Return False if it has none."""
        kv, num_tokens = self._kv.of(sequence), len(sequence.tokens)
        if (
            self._preemptor.reclaim(num_blocks, kv, with_state=True)
            or self._preemptor.free_for(sequence, num_blocks, planner, now_ns)
        ) and self.take_blocks(sequence, num_tokens, None):
            return True
        # its hits may have been blocks of preempted sequences, so that it needs more blocks than before
        return self._preemptor.reclaim(kv.layout.held_for(num_tokens), kv, with_state=True) and self.take_blocks(
            sequence, num_tokens, None
        )

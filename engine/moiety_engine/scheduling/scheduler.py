"""The scheduler: owns every sequence, plans a step and takes in its result.

A sequence is in one of four places. *Waiting*: never started. *Running*: in the batch, with credit (or a ghost of the
padded strategy). *Parked*: without credit; it keeps its blocks while nobody needs them, and no place in the batch.
*Returning*: was running and will again, after a preemption or with new credit, before anyone who came later.

First come, first served: decodes first, then the prefill chunks of running sequences, then as many returning and
waiting ones as the strategy, the token budget and the KV blocks allow. Who needs blocks takes them from the parked and
the returning first; a decode that finds none then takes those of the youngest running sequence, which computes them
again later, in its old place in the queue. It knows no tensors and no clock: times are handed in.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from moiety_engine.messages import CoreFinish, CoreLogprob, CoreOutput, CoreSubmit
from moiety_engine.scheduling.kv import KvLedger
from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.planner import Planner
from moiety_engine.scheduling.strategies import QueueView, Strategy
from moiety_engine.sequence import Sequence
from moiety_wire.messages import FinishReason


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step and of the batch."""

    max_batch_tokens: int
    max_running: int
    batch_size: int = 8
    batch_timeout_ms: float = 0.0


def _order(sequence: Sequence) -> int:
    return sequence.order


class Scheduler:
    """Single-threaded; `plan` and `commit` alternate, the other methods are called between steps."""

    def __init__(self, kv: KvLedger, limits: Limits, strategy: Strategy) -> None:
        self.kv = kv
        self.limits = limits
        self._strategy = strategy
        self._waiting: dict[int, Sequence] = {}  # by key, in order of arrival
        self._returning: list[Sequence] = []  # this and the next two in order of arrival
        self._running: list[Sequence] = []
        self._parked: list[Sequence] = []
        self._by_key: dict[int, Sequence] = {}
        self._num_seen = 0
        self.cached_tokens_total = 0
        self.prompt_tokens_total = 0
        self.output_tokens_total = 0

    # ── requests come and go ──

    def add(self, submit: CoreSubmit, *, seed: int, now_ns: int) -> None:
        """Queue a request. The caller has seen to it that prompt and output fit the pool."""
        sequence = Sequence(submit, order=self._num_seen, seed=seed, queued_unix_ns=now_ns)
        self._num_seen += 1
        self._by_key[submit.key] = sequence
        self._waiting[submit.key] = sequence

    def extend(self, key: int, credit_tokens: int, *, last: bool, now_ns: int) -> CoreOutput | None:
        """Raise a request's credit; ends it if this was the last and is used up."""
        sequence = self._by_key.get(key)
        if sequence is None or sequence.ghost:
            return None
        sequence.credit_tokens = max(sequence.credit_tokens, credit_tokens)
        sequence.credit_last = sequence.credit_last or last
        if sequence.has_credit:
            if sequence in self._parked:
                self._parked.remove(sequence)
                insort(self._returning, sequence, key=_order)
        elif sequence.credit_last:
            return CoreOutput(key, [], None, self._end(sequence, FinishReason.LENGTH, "credit_refused", now_ns))
        return None

    def abort(self, key: int, reason: FinishReason, *, now_ns: int) -> CoreOutput | None:
        """End a request now; its blocks are free when this returns."""
        sequence = self._by_key.get(key)
        if sequence is None:
            return None
        if sequence.ghost:
            self._drop(sequence)
            return None
        sequence.num_reserved = 0  # an aborted row is not kept as a ghost
        return CoreOutput(key, [], None, self._end(sequence, reason, "", now_ns))

    # ── a step ──

    def plan(self, now_ns: int) -> Plan:
        """Decide the next step. Empty only if nothing has credit, or a request waits for company."""
        planner = Planner(self.kv, self.limits.max_batch_tokens)
        preempted: list[Sequence] = []
        for sequence in list(self._running):
            if sequence.ghost or sequence.decoding:
                self._plan_decode(sequence, planner, preempted)
        self._plan_prefills(planner)
        self._admit(planner, now_ns)
        while planner.empty and sum(bool(sequence.blocks) for sequence in self._running) > 1:
            # Half-filled prompts hold all blocks among them: the youngest gives way so that the others end.
            self._preempt(self._running[-1], preempted)
            self._plan_prefills(planner)
        return planner.finish(preempted)

    def commit(
        self, plan: Plan, token_ids: list[int], logprobs: list[CoreLogprob | None], now_ns: int
    ) -> list[CoreOutput]:
        """Take in the step's result: one token for each chunk that samples, in the plan's order."""
        outputs = []
        sampled = iter(zip(token_ids, logprobs, strict=True))
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens
            self.kv.seal(sequence)
            if chunk.samples:
                token_id, logprob = next(sampled)
                sequence.tokens.append(token_id)
                self.output_tokens_total += 1
                if sequence.first_token_unix_ns == 0:
                    sequence.first_token_unix_ns = now_ns
                finish = self._finish_after(sequence, token_id, now_ns)
                if finish is None and not sequence.has_credit:
                    self._running.remove(sequence)
                    insort(self._parked, sequence, key=_order)
                outputs.append(CoreOutput(sequence.key, [token_id], None if logprob is None else [logprob], finish))
        self._retire_ghosts()
        return outputs

    # ── what is there ──

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._returning)

    @property
    def num_paused(self) -> int:
        return len(self._parked)

    @property
    def idle(self) -> bool:
        return not self._by_key

    def kv_slots(self) -> tuple[int, int]:
        """(slots allocated to running sequences, slots of them that hold a token)."""
        allocated = sum(len(sequence.blocks) for sequence in self._running) * self.kv.block_size
        return allocated, sum(sequence.num_computed for sequence in self._running)

    # ── planning ──

    def _plan_decode(self, sequence: Sequence, planner: Planner, preempted: list[Sequence]) -> None:
        while sequence.blocks and planner.rows_left > 0 and not planner.add_decode(sequence):
            if not self._reclaim(1):
                self._preempt(self._running[-1], preempted)  # the youngest, not planned yet; possibly this one

    def _plan_prefills(self, planner: Planner) -> None:
        for sequence in self._running:
            if not sequence.ghost and not sequence.decoding:
                self._plan_prefill(sequence, planner)

    def _plan_prefill(self, sequence: Sequence, planner: Planner) -> None:
        end = sequence.num_computed + min(sequence.num_uncomputed, planner.rows_left)
        self._reclaim(self.kv.blocks_for(end) - len(sequence.blocks))
        planner.add_prefill(sequence)

    def _reclaim(self, num_blocks: int) -> bool:
        """See that so many blocks are free, taking them from parked sequences, then from returning ones, the youngest
        first. Neither can be part of the step. False: all of them together have too few."""
        for holders in (self._parked, self._returning):
            for sequence in reversed(holders):
                if self.kv.pool.num_free >= num_blocks:
                    return True
                self.kv.release(sequence)
        return self.kv.pool.num_free >= num_blocks

    def _preempt(self, victim: Sequence, preempted: list[Sequence]) -> None:
        self._running.remove(victim)
        self.kv.release(victim)
        if victim.ghost:
            self._by_key.pop(victim.key)
            return
        victim.num_preemptions += 1
        insort(self._returning, victim, key=_order)
        preempted.append(victim)

    def _queue(self) -> Iterator[Sequence]:
        """Who may join the batch, in order: all of them have credit."""
        return (s for s in chain(list(self._returning), list(self._waiting.values())) if s.has_credit)

    def _admit(self, planner: Planner, now_ns: int) -> None:
        view = self._view(now_ns)
        joinable = self._strategy.joinable(view) if view is not None else 0
        batch: list[Sequence] = []
        for sequence in self._queue() if joinable > 0 else ():
            if len(batch) >= joinable or (planner.rows_left <= 0 and not self._strategy.padded):
                break
            if self._strategy.padded and not self._fits_padded([*batch, sequence]):
                break
            if not sequence.blocks:
                hits = self.kv.find_prefix(sequence)
                if planner.will_compute(self.kv.next_hash(sequence, len(hits))):
                    continue  # somebody computes this very prefix in this step: next step it is a hit
                if not self._start(sequence, hits):
                    break  # the head waits for blocks; nobody overtakes it, or it might starve
            batch.append(sequence)
            self._mark_started(sequence, now_ns)
            if not self._strategy.padded:
                self._plan_prefill(sequence, planner)
        if self._strategy.padded and batch:
            self._reserve_padded(batch)
            for sequence in batch:
                planner.add_prefill(sequence)

    def _start(self, sequence: Sequence, hits: list[int]) -> bool:
        """Give a sequence its prefix hits, if all of its tokens find room."""
        num_tokens = len(sequence.tokens)
        if self.kv.start(sequence, hits, num_tokens):
            return True
        return self._reclaim(self.kv.blocks_for(num_tokens)) and self.kv.start(
            sequence, self.kv.find_prefix(sequence), num_tokens
        )

    def _mark_started(self, sequence: Sequence, now_ns: int) -> None:
        if self._waiting.pop(sequence.key, None) is None:
            self._returning.remove(sequence)
        insort(self._running, sequence, key=_order)
        if sequence.scheduled_unix_ns == 0:
            sequence.scheduled_unix_ns = now_ns
            sequence.num_cached = sequence.num_computed
            self.cached_tokens_total += sequence.num_cached
            self.prompt_tokens_total += sequence.num_prompt

    def _fits_padded(self, batch: list[Sequence]) -> bool:
        """Whether the pool can hold the batch with every row as long as its longest; alone, a sequence always may."""
        _, reserve = _padded_lengths(batch)
        return len(batch) == 1 or len(batch) * self.kv.blocks_for(reserve) <= self.kv.pool.num_blocks

    def _reserve_padded(self, batch: list[Sequence]) -> None:
        """What padding costs: every row takes the blocks of the longest prompt and the longest output."""
        longest, reserve = _padded_lengths(batch)
        for sequence in batch:
            sequence.num_padded = longest
            sequence.num_reserved = reserve
            self._reclaim(self.kv.blocks_for(reserve) - len(sequence.blocks))
            reserved = self.kv.grow(sequence, reserve)
            assert reserved or len(batch) == 1, "a padded batch was admitted that does not fit"

    def _view(self, now_ns: int) -> QueueView | None:
        """What the strategy may look at; None where nobody could join."""
        oldest = next(self._queue(), None)
        if oldest is None:
            return None
        return QueueView(
            num_running=len(self._running),
            num_waiting=self.num_waiting,
            oldest_wait_ms=(now_ns - oldest.queued_unix_ns) / 1e6,
            max_running=self.limits.max_running,
            batch_size=self.limits.batch_size,
            batch_timeout_ms=self.limits.batch_timeout_ms,
        )

    # ── endings ──

    def _finish_after(self, sequence: Sequence, token_id: int, now_ns: int) -> CoreFinish | None:
        submit = sequence.submit
        if sequence.num_output >= submit.min_tokens and token_id in submit.stop_token_ids:
            return self._end(sequence, FinishReason.STOP, "stop_token", now_ns)
        if sequence.num_output >= submit.max_tokens:
            return self._end(sequence, FinishReason.LENGTH, "max_tokens", now_ns)
        if sequence.credit_last and not sequence.has_credit:
            return self._end(sequence, FinishReason.LENGTH, "credit_refused", now_ns)
        return None

    def _end(self, sequence: Sequence, reason: FinishReason, detail: str, now_ns: int) -> CoreFinish:
        sequence.finished_unix_ns = now_ns
        if self._strategy.padded and sequence.num_reserved and sequence.num_output:
            sequence.ghost = True
        else:
            self._drop(sequence)
        return CoreFinish(
            reason=reason,
            detail=detail,
            num_cached_tokens=sequence.num_cached,
            num_output_tokens=sequence.num_output,
            scheduled_unix_ns=sequence.scheduled_unix_ns,
            first_token_unix_ns=sequence.first_token_unix_ns,
            finished_unix_ns=now_ns,
        )

    def _drop(self, sequence: Sequence) -> None:
        self._by_key.pop(sequence.key)
        self.kv.release(sequence)
        if self._waiting.pop(sequence.key, None) is None:
            for place in (self._running, self._parked, self._returning):
                if sequence in place:
                    place.remove(sequence)

    def _retire_ghosts(self) -> None:
        """A padded batch is over when all of its rows are: then the blocks go back together."""
        if self._running and all(sequence.ghost for sequence in self._running):
            for sequence in list(self._running):
                self._drop(sequence)


def _padded_lengths(batch: list[Sequence]) -> tuple[int, int]:
    """(longest prompt, that plus the longest output) of a batch."""
    longest = max(len(s.tokens) for s in batch)
    return longest, longest + max(s.submit.max_tokens - s.num_output for s in batch)

"""The scheduler: owns every waiting and running sequence, plans a step and takes in its result.

First come, first served: decodes first, then the prefill chunks of running requests, then as many waiting requests as
the strategy, the token budget and the KV blocks allow. When a decode finds no block, the youngest sequence gives up
its own and computes them again later, in its old place in the queue; sequences that are paused for want of credit go
first. It knows no tensors and no clock: times are handed in.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from moiety_engine.messages import CoreFinish, CoreLogprob, CoreOutput, CoreSubmit
from moiety_engine.scheduling.kv import KvLedger
from moiety_engine.scheduling.plan import Chunk, Plan
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
        self._preempted: list[Sequence] = []  # before the waiting, in order of arrival
        self._running: list[Sequence] = []  # in order of arrival
        self._by_key: dict[int, Sequence] = {}
        self._num_seen = 0
        self.cached_tokens_total = 0
        self.prompt_tokens_total = 0
        self.output_tokens_total = 0

    # ── requests come and go ──

    def add(self, submit: CoreSubmit, *, seed: int) -> None:
        """Queue a request. The caller has seen to it that prompt and output fit the pool."""
        sequence = Sequence(submit, order=self._num_seen, seed=seed)
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
        if sequence.credit_last and not sequence.has_credit:
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
        """Decide the next step. May be empty: everything is paused, or waits for company."""
        planner = _Planner(self.kv, self.limits.max_batch_tokens)
        preempted: list[Sequence] = []
        for sequence in list(self._running):
            if sequence.ghost or (sequence.decoding and sequence.has_credit):
                self._plan_decode(sequence, planner, preempted)
        for sequence in self._running:
            if not sequence.ghost and not sequence.decoding:
                planner.add_prefill(sequence)
        self._admit(planner, preempted, now_ns)
        while not planner.chunks and (victim := self._stalled_prefill()) is not None:
            # Half-filled prompts hold all blocks among them: the youngest gives way so that the others end.
            self._preempt(victim, preempted)
            for sequence in self._running:
                planner.add_prefill(sequence)
        return Plan(
            chunks=planner.decodes + planner.prefills,
            num_decode=len(planner.decodes),
            num_rows=planner.num_rows,
            preempted=preempted,
        )

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
                outputs.append(CoreOutput(sequence.key, [token_id], None if logprob is None else [logprob], finish))
        self._retire_ghosts()
        return outputs

    # ── what is there ──

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._preempted)

    @property
    def num_paused(self) -> int:
        return sum(not sequence.has_credit for sequence in self._running)

    @property
    def idle(self) -> bool:
        return not self._by_key

    def kv_slots(self) -> tuple[int, int]:
        """(slots allocated to running sequences, slots of them that hold a token)."""
        allocated = sum(len(sequence.blocks) for sequence in self._running) * self.kv.block_size
        return allocated, sum(sequence.num_computed for sequence in self._running)

    # ── planning ──

    def _plan_decode(self, sequence: Sequence, planner: _Planner, preempted: list[Sequence]) -> None:
        while sequence.blocks and not planner.add_decode(sequence):
            if planner.num_rows >= self.limits.max_batch_tokens:
                return
            self._preempt(self._victim(), preempted)  # the youngest; possibly this one

    def _victim(self) -> Sequence:
        """Who gives up its blocks: the youngest without credit, else the youngest."""
        for sequence in reversed(self._running):
            if not sequence.has_credit and sequence.blocks and not sequence.ghost:
                return sequence
        return self._running[-1]

    def _preempt(self, victim: Sequence, preempted: list[Sequence]) -> None:
        self._running.remove(victim)
        self.kv.release(victim)
        if victim.ghost:
            self._by_key.pop(victim.key, None)
            return
        victim.num_preemptions += 1
        insort(self._preempted, victim, key=_order)
        preempted.append(victim)

    def _stalled_prefill(self) -> Sequence | None:
        """The youngest running sequence that holds blocks and waits for more, if at least two share the pool."""
        holders = [s for s in self._running if s.blocks]
        stalled = [s for s in holders if s.num_uncomputed > 1 or (not s.has_credit and s.num_uncomputed)]
        wanting = any(s.num_uncomputed > 1 for s in self._running)
        return stalled[-1] if wanting and len(holders) > 1 and stalled else None

    def _queue(self) -> Iterator[Sequence]:
        return chain(list(self._preempted), list(self._waiting.values()))

    def _admit(self, planner: _Planner, preempted: list[Sequence], now_ns: int) -> None:
        if not self.num_waiting:
            return
        joinable = self._strategy.joinable(self._view(now_ns))
        batch: list[Sequence] = []
        for sequence in self._queue():
            if len(batch) >= joinable or (planner.full and not self._strategy.padded):
                break
            if sequence.num_preemptions and not sequence.has_credit:
                continue  # it would only take blocks to sit on them
            if self._strategy.padded and not self._fits_padded([*batch, sequence]):
                break
            hits = self.kv.find_prefix(sequence)
            if planner.will_compute(self.kv.next_hash(sequence, len(hits))):
                continue  # somebody computes this very prefix in this step: next step it is a hit
            if not self._start(sequence, hits, preempted):
                break  # the head waits for blocks; nobody overtakes it, or it might starve
            batch.append(sequence)
            self._mark_started(sequence, now_ns)
            if not self._strategy.padded:
                planner.add_prefill(sequence)
        if self._strategy.padded and batch:
            self._reserve_padded(batch)
            for sequence in batch:
                planner.add_prefill(sequence)

    def _start(self, sequence: Sequence, hits: list[int], preempted: list[Sequence]) -> bool:
        while not self.kv.start(sequence, hits, len(sequence.tokens)):
            paused = [s for s in self._running if not s.has_credit and s.blocks and not s.ghost]
            if not paused:
                return False
            self._preempt(paused[-1], preempted)
            hits = self.kv.find_prefix(sequence)
        return True

    def _mark_started(self, sequence: Sequence, now_ns: int) -> None:
        if sequence.num_preemptions:
            self._preempted.remove(sequence)
        else:
            del self._waiting[sequence.key]
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
            reserved = self.kv.grow(sequence, reserve)
            assert reserved or len(batch) == 1, "a padded batch was admitted that does not fit"

    def _view(self, now_ns: int) -> QueueView:
        oldest = next(self._queue())
        return QueueView(
            num_running=len(self._running),
            num_waiting=self.num_waiting,
            oldest_wait_ms=(now_ns - oldest.submit.arrival_unix_ns) / 1e6,
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
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._preempted:
            self._preempted.remove(sequence)
        else:
            self._waiting.pop(sequence.key, None)

    def _retire_ghosts(self) -> None:
        """A padded batch is over when all of its rows are: then the blocks go back together."""
        if self._running and all(sequence.ghost for sequence in self._running):
            for sequence in list(self._running):
                self._drop(sequence)


def _padded_lengths(batch: list[Sequence]) -> tuple[int, int]:
    """(longest prompt, that plus the longest output) of a batch."""
    longest = max(len(s.tokens) for s in batch)
    return longest, longest + max(s.submit.max_tokens - s.num_output for s in batch)


class _Planner:
    """The step under construction: rows used, chunks so far, and the prefix blocks that it will complete."""

    def __init__(self, kv: KvLedger, budget: int) -> None:
        self._kv = kv
        self._budget = budget
        self.num_rows = 0
        self.decodes: list[Chunk] = []
        self.prefills: list[Chunk] = []
        self._in_flight: set[bytes] = set()

    @property
    def chunks(self) -> bool:
        return bool(self.decodes or self.prefills)

    @property
    def full(self) -> bool:
        return self.num_rows >= self._budget

    def will_compute(self, block_hash: bytes | None) -> bool:
        return block_hash in self._in_flight

    def add_decode(self, sequence: Sequence) -> bool:
        """One row for a decoding sequence. False: no row or no block left."""
        if self.full or not self._kv.grow(sequence, sequence.num_computed + 1):
            return False
        chunk = Chunk(sequence, 0, False, num_pad=1) if sequence.ghost else Chunk(sequence, 1, True)
        self.decodes.append(chunk)
        self.num_rows += 1
        return True

    def add_prefill(self, sequence: Sequence) -> None:
        """As much of the sequence's uncomputed tokens as rows and blocks allow, possibly nothing."""
        wanted = sequence.num_uncomputed if sequence.has_credit else sequence.num_uncomputed - 1
        room = self._kv.room_tokens(sequence) - sequence.num_computed
        num_tokens = min(wanted, self._budget - self.num_rows, room)
        if num_tokens <= 0:
            return
        end = sequence.num_computed + num_tokens
        grown = self._kv.grow(sequence, end)
        assert grown, "room_tokens promised blocks that are not there"
        ends = end == len(sequence.tokens)
        pad = min(max(sequence.num_padded - end, 0), self._budget - self.num_rows - num_tokens) if ends else 0
        pad = min(pad, len(sequence.blocks) * self._kv.block_size - end)
        self._in_flight.update(self._kv.completed_hashes(sequence, end))
        self.prefills.append(Chunk(sequence, num_tokens, ends, pad))
        self.num_rows += num_tokens + pad

"""A replica with the real scheduler, block pool and host tier, and stand-ins for the model, under virtual time.

The stand-in for the model records, for each KV slot, the text whose KV it holds. At each step it checks that the blocks
that a sequence reads hold what the sequence has computed, so a block that is lost, mixed up or overwritten is found.
The stand-in for a draft model does the same with its own slots in the same blocks, and so does the one for a layer for
multi-token prediction, where a slot also depends on the next token."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import msgspec
from tests.core_submits import core_submit

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.cache.state_slots import StateSlots
from moiety_engine.messages import CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.scheduling.admission.batching_strategies import STRATEGIES
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.kv.prefix_search import held_blocks
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.scheduling.policies.moiety.moiety import Moiety
from moiety_engine.scheduling.preemption.preemption_execution import SwapCost
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_engine.scheduling.speculative_decoding.draft_model_proposer import DraftModelProposer
from moiety_engine.scheduling.speculative_decoding.drafted_kv import DraftedKv
from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel
from moiety_engine.sequence import PENDING, Sequence, SequenceState
from moiety_wire.classes import BATCH, FLEX, PRIORITY, STANDARD, OverloadAction, ServiceClass
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import FinishReason, Sampling
from moiety_wire.trace_events import Reason

BLOCK_SIZE = 4
EOS = 7
MAX_PROMPT = 24
MAX_OUTPUT = 16
MAX_DRAFTED = MAX_PROMPT + MAX_OUTPUT - 3  # tokens that a draft model reads
CLASSES: dict[str, Any] = {
    "patient priority": msgspec.structs.replace(PRIORITY, on_overload=OverloadAction.QUEUE, max_queue_s=1.0),
    "priority": PRIORITY,
    "standard": msgspec.structs.replace(STANDARD, on_overload=OverloadAction.DOWNGRADE, max_queue_s=2.0),
    "flex": msgspec.structs.replace(FLEX, completion_s=3.0, max_queue_s=5.0),
    "batch": msgspec.structs.replace(BATCH, max_queue_s=20.0),
    "spot": ServiceClass("spot", 9, completion_s=86_400.0, on_overload=OverloadAction.QUEUE, spot=True),
}


@dataclass(repr=False)
class Client:
    """One request from its client's point of view."""

    submit: CoreSubmit
    answer: int  # the number of tokens that the model would generate
    credit: int
    tokens: list[int] = field(default_factory=list)
    finish: CoreFinish | None = None
    refused: Reason | None = None
    aborted: bool = False
    last_credit: bool = False
    repeats: int = 0  # the output repeats itself after this many tokens; 0: never

    def __repr__(self) -> str:
        return f"request {self.submit.key}"

    @property
    def over(self) -> bool:
        return self.finish is not None or self.refused is not None

    def says(self, position: int) -> int:
        if position == self.answer - 1 and self.answer < self.submit.max_tokens:
            return EOS
        if self.repeats == 0 or position % 7 == 6:  # a repetitive output also has exceptions
            return 100 + position
        return 200 + position % self.repeats


def make_scheduler(
    policy: str,
    num_blocks: int,
    host_blocks: int,
    budget: int,
    max_running: int,
    max_waiting: int = 12,
    batching: Batching = Batching.CONTINUOUS,
    draft_tokens: int = 0,
    num_groups: int = 1,
    held: DraftedKv | None = None,
    windows: tuple[int | None, ...] = (None,),
    num_snapshots: int | None = None,
    steps_in_flight: int = 1,
) -> Scheduler:
    """Return a scheduler. With `num_snapshots`, its sequences have recurrent states."""
    pipeline = {"steps_in_flight": steps_in_flight, "min_chunk_tokens": 2}

    def ledger() -> KvLedger:
        host = HostTier(host_blocks * len(windows)) if host_blocks else None
        states = None if num_snapshots is None else StateSlots(max_running + num_snapshots, 2 if host_blocks else 0)
        tables: dict[str, Any] = {"windows": windows, "max_chunk_tokens": budget, "states": states}
        return KvLedger(BlockPool(num_blocks * len(windows)), BLOCK_SIZE, prefix_caching=True, host=host, **tables)

    return Scheduler(
        ledger(),
        SchedulerLimits(budget, max_running, batch_size=4, max_waiting=max_waiting, **pipeline),
        STRATEGIES[batching],
        policy,
        step_time=StepTimeModel((0.01, 0.05, 0.0, 0.0, 0.001, 0.001, 0.0)),
        swap=SwapCost(1e-5),
        draft_tokens=draft_tokens,
        proposer=None if held is None else DraftModelProposer(held, MAX_DRAFTED),
        further=[ledger() for _ in range(num_groups - 1)],
    )


def make_submit(
    key: int, tenant: int, service: ServiceClass, prompt: list[int], max_tokens: int, now_ns: int, weight: float
) -> CoreSubmit:
    return core_submit(
        key,
        prompt,
        max_tokens,
        tenant_id=f"t{tenant}",
        service=service,
        sampling=Sampling(),
        stop_token_ids=[EOS],
        credit_tokens=1 << 20,
        cache_salt=b"%d" % tenant,
        arrival_unix_ns=now_ns,
        tenant_weight=weight,
        fallback=CLASSES["flex"],
    )


class Replica:
    """A scheduler, the virtual clock, the memory of a model, and the clients. Looks at each law where it can break.
    With `overlap` a step is planned while one runs, as on a GPU: what that samples only the device knows by then. With
    several steps in flight, as in a pipeline of ranks, no step needs what an earlier one of them samples."""

    def __init__(self, scheduler: Scheduler, *, overlap: bool = False, held: DraftedKv | None = None) -> None:
        self.scheduler = scheduler
        self.overlap = overlap
        self._held = held  # of a draft model
        self._drafter: dict[tuple[int, int], object] = {}  # as the next, of its cache
        self._flights: deque[tuple[Plan, list[int], list[bytes]]] = deque()
        self.most_in_flight = 0
        self.now_ns = 10**12
        self.clients: dict[int, Client] = {}
        # (block, offset) → the table, and the text up to the token that is there
        self._device: dict[tuple[int, int], object] = {}
        self._host: dict[tuple[int, int], object] = {}
        self._states: dict[int, object] = {}  # by slot: the text that is in the state
        self.num_drafted = 0

    def add(self, client: Client) -> None:
        self.clients[client.submit.key] = client
        self.scheduler.add(client.submit, seed=0, now_ns=self.now_ns)
        self._take_verdicts()

    def extend(self, client: Client, credit: int, *, last: bool) -> None:
        client.credit = max(client.credit, credit)
        client.last_credit = client.last_credit or last
        self._take(self.scheduler.extend(client.submit.key, credit, last=last, now_ns=self.now_ns))

    def abort(self, client: Client) -> None:
        client.aborted = True
        self._take(self.scheduler.abort(client.submit.key, FinishReason.ABORT, now_ns=self.now_ns))

    def step(self, seconds: float) -> Plan:
        scheduler, depth = self.scheduler, self.scheduler.limits.steps_in_flight
        if depth > 1 and len(self._flights) == depth:
            self._commit_oldest()
        plan = self._drafted(scheduler.plan(self.now_ns))
        assert plan.num_rows <= scheduler.limits.max_batch_tokens
        assert plan.num_rows == sum(chunk.num_tokens + chunk.num_pad for chunk in plan.chunks)
        assert len({chunk.sequence.key for chunk in plan.chunks}) == len(plan.chunks)
        assert len(scheduler.queues.running) <= scheduler.limits.max_running
        if not plan.chunks and not self._flights:
            assert not [s.key for s in scheduler.queues.by_key.values() if s.has_credit], (
                "work is left, and none is done"
            )
        self._check_preempted(plan)
        self._copy(plan)
        tokens = [token for chunk in plan.chunks for token in self._run(chunk)]
        vectors = [b"%d" % chunk.sequence.key for chunk in plan.chunks if chunk.embeds]
        self.now_ns += int(seconds * 1e9)
        num_before = len(self._flights)
        if plan.chunks or not self.overlap:
            self._flights.append((plan, tokens, vectors))
        if (depth > 1 and not plan.chunks) or (depth == 1 and (num_before or not self.overlap)):
            self._commit_oldest()
        if plan.chunks and self.overlap:
            scheduler.launched(plan)
        self.most_in_flight = max(self.most_in_flight, len(self._flights))
        self._take_verdicts()
        return plan

    def _commit_oldest(self) -> None:
        if self._flights:
            plan, tokens, vectors = self._flights.popleft()
            for output in self.scheduler.commit(plan, tokens, [None] * len(tokens), self.now_ns, vectors):
                self._take(output)

    def _drafted(self, plan: Plan) -> Plan:
        """Stand for a draft model: it records which tokens' KV it has, and computes the others."""
        if self._held is None:
            return plan
        return msgspec.structs.replace(plan, chunks=[self._with_draft(self._held, chunk) for chunk in plan.chunks])

    def _with_draft(self, held: DraftedKv, chunk: Chunk) -> Chunk:
        if not chunk.draft:
            return chunk
        assert set(chunk.draft) == {PENDING}
        sequence, client = chunk.sequence, self.clients[chunk.sequence.key]
        tokens, positions = self._tokens(sequence), range(sequence.num_output, sequence.num_output + len(chunk.draft))
        said = [client.says(position) if position % 5 else -3 for position in positions]
        first, read, end = held.num_there(sequence), [*tokens, *said[:-1]], len(tokens) - held.lag
        assert first < end and len(tokens) + len(said) <= MAX_DRAFTED
        for i in range(len(read) - held.lag):
            slot, text = (
                (self._block(sequence, i), i % BLOCK_SIZE),
                [sequence.request.submit.cache_salt, *read[: i + 1]],
            )
            if i % BLOCK_SIZE < BLOCK_SIZE - 1:  # KV that depends on the next token may be another's
                text += read[i + 1 : i + 1 + held.lag]
            if held.lag and i >= end:
                text.append("guessed")
            if i < first:
                assert self._drafter.get(slot) == text, (
                    f"token {i} of request {sequence.key} is not what was drafted on"
                )
            self._drafter[slot] = text
        held.record_computed(sequence, first, end, said[:-1])
        return chunk._replace(draft=tuple(said))

    def _tokens(self, sequence: Sequence) -> list[int]:
        """Return the sequence's tokens as the device knows them."""
        if not sequence.pending:
            assert PENDING not in sequence.tokens
            return sequence.tokens
        assert len(self._flights) == self.scheduler.limits.steps_in_flight == 1, (
            "a step needs a token of an earlier one"
        )
        assert sequence.tokens.index(PENDING) == len(sequence.tokens) - 1
        return [*sequence.tokens[:-1], self._flights[0][1][sequence.pending_row]]

    def _run(self, chunk: Chunk) -> list[int]:
        """Read the KV of computed tokens and write that of the chunk; return the next token if the chunk samples."""
        sequence = chunk.sequence
        tokens = self._tokens(sequence)
        assert chunk.sequence not in self.scheduler.queues.verifying, "planned while its draft or token is computed"
        tokens = [*tokens, *chunk.draft]
        texts = [(sequence.request.submit.cache_salt, tuple(tokens[: i + 1])) for i in range(len(tokens))]
        end = sequence.kv.num_computed + chunk.num_tokens
        self._compute_tables(sequence, texts, end)
        self._compute_state(sequence, texts, end)
        for i in range(end, end + chunk.num_pad):
            self._device[self._block(sequence, i), i % BLOCK_SIZE] = "padding"
        if sequence.padded_row.is_finished:
            return []
        assert (chunk.embeds if sequence.request.submit.embed else chunk.samples) == (end == len(tokens))
        assert not (chunk.samples and chunk.embeds)
        client, num_output = self.clients[sequence.key], sequence.num_output
        if chunk.draft:
            assert num_output + 1 + len(chunk.draft) <= min(client.credit, client.submit.max_tokens), "drafted unpaid"
            self.num_drafted += len(chunk.draft)
        said = [client.says(position) for position in range(num_output, num_output + 1 + len(chunk.draft))]
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chunk.draft, said, strict=False)))
        wrong = [-2] * (len(chunk.draft) - right)  # no client may get what is sampled after a rejected draft
        return (said[: right + 1] + wrong) if chunk.samples else []

    def _compute_tables(self, sequence: Sequence, texts: list[Any], end: int) -> None:
        computed, windows = sequence.kv.num_computed, self.scheduler.kv.layout.windows
        for number, (table, window) in enumerate(zip(sequence.kv.tables, windows, strict=True)):
            for i in range(0 if window is None else max(0, computed - window + 1), end):
                slot = self._first_block(sequence) + table[i // BLOCK_SIZE], i % BLOCK_SIZE
                if i < computed:
                    assert self._device.get(slot) == (number, texts[i]), f"{sequence.key} lost the KV of token {i}"
                self._device[slot] = number, texts[i]

    def _compute_state(self, sequence: Sequence, texts: list[Any], end: int) -> None:
        states, computed = self.scheduler.kv.states, sequence.kv.num_computed
        if states is None or end == computed:
            return
        slot = sequence.kv.group * (states.num_slots + states.num_host_slots) + sequence.kv.state_slot
        assert not computed or self._states.get(slot) == texts[computed - 1], f"{sequence.key} lost its state"
        self._states[slot] = texts[end - 1]

    def _first_block(self, sequence: Sequence) -> int:
        """The number of the first block of the sequence's group, among all groups' blocks."""
        return sequence.kv.group * self.scheduler.kv.pool.num_blocks

    def _block(self, sequence: Sequence, position: int) -> int:
        """Return a block by its number among all groups' blocks."""
        return self._first_block(sequence) + sequence.kv.blocks[position // BLOCK_SIZE]

    def _copy(self, plan: Plan) -> None:
        for copies, source, target in (
            (plan.swap_out, self._device, self._host),
            (plan.swap_in, self._host, self._device),
        ):
            for there, here in copies:
                for offset in range(BLOCK_SIZE):
                    target[here, offset] = source.get((there, offset))
        for there, here in plan.state_copies:
            self._states[here] = self._states.get(there)

    def _check_preempted(self, plan: Plan) -> None:
        policy = self.scheduler.policy
        if isinstance(policy, Moiety):
            for s in plan.preempted:
                assert s.timeline.num_preemptions <= 2 or s.service.spot
                kept_blocks = bool(s.kv.blocks)  # it returned a slot beyond its tenant's share, and no memory
                reserved_tokens = policy._kv_admission._guarantees.reserved_tokens(s)
                assert s.service.preemptible or kept_blocks or len(s.tokens) > reserved_tokens, (
                    "preempted within its reservation"
                )

    def _take(self, output: CoreOutput | None) -> None:
        if output is None:
            return
        client = self.clients[output.key]
        assert not client.over, "news of a request that had ended"
        for token in output.token_ids:
            assert token == client.says(len(client.tokens)), "a token was lost or repeated"
            client.tokens.append(token)
        assert len(client.tokens) <= client.credit
        client.finish = output.finish

    def _take_verdicts(self) -> None:
        _, failures = self.scheduler.take_verdicts()
        for failure in failures:
            client = self.clients[failure.key]
            assert not client.tokens and not client.over
            client.refused = failure.reason

    # ── laws that hold between steps ──

    def check(self) -> None:
        sequences = list(self.scheduler.queues.by_key.values())
        ended = {s.key for s in sequences if s.padded_row.is_finished and not s.pending}
        assert {s.key for s in sequences} - ended == {key for key, client in self.clients.items() if not client.over}
        self._check_blocks(sequences)
        queued = [s for s in sequences if s.entry & 1]
        assert self.scheduler.policy.num_queued == len(queued)
        for s in sequences:
            decoding = s.state is SequenceState.RUNNING and (s.decoding or s.padded_row.is_finished)
            is_queued = s.has_credit and not decoding and s.state is not SequenceState.FINISHING
            assert bool(s.entry & 1) == is_queued, s.state
            assert s.state is not SequenceState.FINISHING or self.overlap
            assert not s.pending or self.overlap
        places = self.scheduler.queues
        running = [s for s in sequences if s.state is SequenceState.RUNNING]
        verifying, last = set(places.verifying), {s for s in running if s.decoding or s.padded_row.is_finished}
        assert set(places.decoding) == last - verifying
        assert set(places.prefilling) == set(running) - set(places.decoding) - verifying
        assert set(places.verifying) <= {s for s in running if s.pending}
        assert places.counts.worst_rank == max((s.service.rank for s in running), default=-1)
        for rank in {s.service.rank for s in sequences}:
            held = Counter(s.request.tenant for s in running if s.service.rank == rank)
            several = {one: num for one, num in held.items() if num > 1}
            assert places.counts.of_rank(rank) == (held.total(), held, several)
        self._check_sums(running)
        self._check_tally(sequences)

    def _check_sums(self, running: list[Sequence]) -> None:
        """Check that the sums that are kept between decisions equal those over all sequences."""
        places = self.scheduler.queues
        due_s = min((s.deadlines.next_due_s for s in places.decoding), default=math.inf)
        context = sum(s.kv.num_computed for s in places.decoding)
        assert places.sums_of(list(places.decoding.values())) == (due_s, context)
        if all(s.predicted_output >= s.num_output for s in running):  # the policy predicts
            assert places.remaining_output() >= sum(s.remaining_output for s in running) - 1e-6
        full = {
            s
            for s in places.decoding
            if not s.padded_row.is_finished and s.kv.num_computed == len(s.kv.blocks) * BLOCK_SIZE
        }
        assert full <= set(places.filled)

    def _check_blocks(self, sequences: list[Sequence]) -> None:
        for group, kv in enumerate(self.scheduler.groups):
            members = [s for s in sequences if s.kv.group == group]
            assert kv.pool.num_used == len({block for s in members for block in held_blocks(s.kv)})
            unsealed = [block for s in members for table in s.kv.tables for block in table[s.kv.num_sealed :]]
            if kv.states is not None:
                slots = [s.kv.state_slot for s in members if 0 <= s.kv.state_slot < kv.states.num_slots]
                assert kv.states.pool.num_used == len(slots) == len(set(slots))
            assert len(unsealed) == len(set(unsealed)), "two sequences write one block"
            if kv.host is not None:
                pool = kv.host.pool
                assert pool.num_used == len({block for s in members for block in s.kv.host_blocks})
                assert pool.num_used + pool.num_cached + pool.num_blank == pool.num_blocks
        for s in sequences:
            assert not (s.kv.blocks and s.kv.host_blocks)
            needed = self.scheduler.groups.of(s).num_computed_blocks(s)
            assert s.kv.num_computed <= len(s.kv.blocks) * BLOCK_SIZE or needed == len(s.kv.host_blocks)
            assert s.kv.num_held == len(held_blocks(s.kv))

    def _check_tally(self, sequences: list[Sequence]) -> None:
        waiting: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for s in sequences:
            running[s.service.name] += s.state is SequenceState.RUNNING
            waiting[s.service.name] += s.state in {SequenceState.WAITING, SequenceState.RETURNING}
        for load in self.scheduler.class_loads():
            assert (load.num_waiting, load.num_running) == (waiting[load.name], running[load.name])
            queued = [
                s.request.queued_unix_ns / 1e9
                for s in sequences
                if s.service.name == load.name and s.state in {SequenceState.WAITING, SequenceState.RETURNING}
            ]
            assert load.oldest_waiting_unix_s == min(queued, default=0.0)
        held = Counter[str]()
        for s in sequences:
            held[s.request.tenant] += s.kv.num_held
        assert self.scheduler.queues.tenant_blocks(len(held)) == dict(+held)

    def drain(self) -> None:
        """Add no more requests, and check that all admitted ones end with all their tokens in a bounded number of
        steps."""
        for client in self.clients.values():
            if not client.over:
                self.extend(client, 1 << 20, last=False)
        bound = 100 + 6 * sum(
            len(c.submit.prompt_ids) + c.submit.max_tokens for c in self.clients.values() if not c.over
        )
        for _ in range(bound):
            if self.scheduler.idle:
                break
            self.step(0.01)
            self.check()
        assert self.scheduler.idle, f"{[s.key for s in self.scheduler.queues.by_key.values()]} starve"
        while self._flights:
            self._commit_oldest()
        stopped = [c for c in self.clients.values() if c.aborted or (c.tokens and c.tokens[-1] == EOS)]
        assert self.scheduler.output_processor.tokens_past_stop_total <= self.overlap * len(stopped), "computed in vain"
        assert self.scheduler.groups.num_used == 0
        for client in self.clients.values():
            if client.finish is not None:
                assert client.finish.num_output_tokens == len(client.tokens)
                assert client.finish.num_accepted_tokens <= client.finish.num_drafted_tokens
                if not client.aborted and client.finish.detail != "credit_refused":
                    assert len(client.tokens) == min(client.answer, client.submit.max_tokens)
                    assert client.finish.embedding == (b"%d" % client.submit.key if client.submit.embed else b"")

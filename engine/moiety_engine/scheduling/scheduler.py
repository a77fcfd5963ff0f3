"""Scheduler: owns every sequence, plans steps and processes their results.

The next step may be planned while one runs, or several in a pipeline of ranks. Effects of a step that do not depend on
the sampled tokens are applied at launch: tokens count as computed, a pending token counts against credit and length
limits, and sequences that reach a limit leave the batch. Other effects follow with the tokens. So only a sequence that
stops by itself, or is aborted, may be in one more step than it needs; the extra token is discarded and counted. A
sequence whose draft runs, and in a pipeline every sequence that waits for a token, is in no other step until the result
is known.

Decodes come first, then prefill in the order of the policy. Blocks are taken from sequences outside the batch, then
from victims that the policy names; these resume later, in their old position, without repeating a token. The scheduler
uses no tensors and no clock: times are passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from moiety_engine.images.encoder_cost import EncoderWork
from moiety_engine.messages import CoreAdmission, CoreFailure, CoreFinish, CoreLogprob, CoreOutput, CoreSubmit
from moiety_engine.scheduling.admission.admission_queue import AdmissionQueue
from moiety_engine.scheduling.admission.batching_strategies import Strategy
from moiety_engine.scheduling.fairness.service_exchange import ServiceExchange
from moiety_engine.scheduling.kv.kv_groups import KvGroups
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.outputs.finish import NonFiniteEnd, finish_of
from moiety_engine.scheduling.outputs.output_predictor import OutputPredictor
from moiety_engine.scheduling.outputs.output_processor import OutputProcessor
from moiety_engine.scheduling.pipeline_division import PipelineDivision
from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.policies.policy_interface import BatchView, Policy, PolicyContext
from moiety_engine.scheduling.policies.registry import make_policy
from moiety_engine.scheduling.preemption.preemption_execution import Preemptor, SwapCost
from moiety_engine.scheduling.prefill.padded_prefill_planner import PaddedPrefillPlanner
from moiety_engine.scheduling.prefill.prefill_planner import PrefillPlanner
from moiety_engine.scheduling.queues.class_counters import ClassCounters
from moiety_engine.scheduling.queues.request_queues import RequestQueues
from moiety_engine.scheduling.scheduler_state import SchedulerState
from moiety_engine.scheduling.speculative_decoding.ngram_proposer import NgramProposer
from moiety_engine.scheduling.speculative_decoding.proposer import Proposer
from moiety_engine.scheduling.speculative_decoding.speculator import Speculator
from moiety_engine.scheduling.speculative_prefill.speculative_prefill import SpeculativePrefill
from moiety_engine.scheduling.step_planner import StepPlanner
from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel
from moiety_engine.scheduling.step_time.step_timing import StepTiming
from moiety_engine.sequence import Sequence, SequenceState
from moiety_engine.structured_outputs.stepping import GrammarHandle
from moiety_wire.engine_load import ClassLoad
from moiety_wire.messages import FinishReason

_QUEUED = (SequenceState.WAITING, SequenceState.RETURNING)


class Scheduler:
    """Scheduler of one replica. Single-threaded.

    A step is planned, launched and committed. The next step may be planned before the running one is committed, and is
    launched afterwards; in a pipeline, `limits.steps_in_flight` steps may be launched, and are committed in order. All
    other methods are called between steps.
    """

    def __init__(
        self,
        kv: KvLedger,
        limits: SchedulerLimits,
        strategy: Strategy,
        policy_name: str = "fcfs",
        *,
        step_time: StepTimeModel | None = None,
        lengths: OutputPredictor | None = None,
        swap: SwapCost | None = None,
        draft_tokens: int = 0,  # longest draft; not with padded batching
        proposer: Proposer | None = None,  # source of drafts; n-gram lookup if None
        further: Iterable[KvLedger] = (),  # ledgers of further rank groups; not with padded batching
    ) -> None:
        self.kv = kv
        self.groups = groups = KvGroups([kv, *further])
        self.limits = limits
        self._strategy = strategy
        self.step_time = step_time or StepTimeModel()
        self.lengths = lengths or OutputPredictor()
        self.tally, self.queues = ClassCounters(), RequestQueues()
        self.policy: Policy = make_policy(
            policy_name,
            PolicyContext(
                step_time=self.step_time,
                lengths=self.lengths,
                tally=self.tally,
                max_batch_tokens=limits.max_batch_tokens,
                max_running=limits.max_running,
                max_waiting=limits.max_waiting,
                num_blocks=kv.pool.num_blocks,
                layout=kv.layout,
                cached_tokens=groups.num_cached,
                running=self.queues.counts,
                batches_experts=limits.batches_experts,
            ),
        )
        self.service_exchange: ServiceExchange | None = None  # set if tenants' service is exchanged between replicas
        self.encoder_work = EncoderWork(limits.encoder_cost)
        state = SchedulerState(groups, self.queues, self.policy, self.tally, self.step_time, self.encoder_work)
        self._preemptor = Preemptor(state, swap or SwapCost())
        self.speculative_prefill = SpeculativePrefill(groups, self.step_time, is_possible=not strategy.padded)
        self._division = PipelineDivision(self.queues, self.step_time, limits)
        self._prefill_planner = PrefillPlanner(
            state, self._preemptor, self.speculative_prefill, waits_for_tokens=self._division.is_active
        )
        self._padded = PaddedPrefillPlanner(kv, self.policy, self._preemptor, self._prefill_planner)
        self._admission_queue = AdmissionQueue(state, limits.max_waiting, self._drop)
        self._running: deque[Plan] = deque()  # launched, not committed
        self._step_timing = StepTiming(self.step_time)
        proposer = proposer or NgramProposer()
        self.speculator = Speculator(draft_tokens, self.step_time, proposer, groups) if draft_tokens else None
        self.output_processor = OutputProcessor(
            self.queues, self.speculator, on_computed=self._computed, on_end=self._end, on_pause=self._pause_sequence
        )
        self.output_tokens_total = self.recomputed_tokens_total = 0
        self.prefill_seconds_total = self.decode_seconds_total = 0.0  # of steps with and without prompt tokens

    # ── requests ──

    def add(
        self,
        submit: CoreSubmit,
        *,
        seed: int,
        now_ns: int,
        received_ns: int | None = None,
        grammar: GrammarHandle | None = None,
        num_transferred_tokens: int = 0,
    ) -> None:
        """Queue a request or reject it (see `take_verdicts`).

        The caller has checked that prompt and output fit the pool. `received_ns` is given for a request that had to
        wait before. `num_transferred_tokens` is the number of tokens whose KV came from another engine. A speculative
        prefill is not a request: `speculative_prefill.take_ended` reports its end.
        """
        self._prefill_planner.requeue_examined()
        if submit.speculative_prefill is not None:
            self.speculative_prefill.add(submit, now_ns)
            return
        self._admission_queue.add(
            submit,
            seed=seed,
            now_ns=now_ns,
            received_ns=now_ns if received_ns is None else received_ns,
            grammar=grammar,
            num_transferred_tokens=num_transferred_tokens,
        )

    def extend(self, key: int, credit_tokens: int, *, last: bool, now_ns: int) -> CoreOutput | None:
        """Raise a request's credit; end the request if the credit is final and used up."""
        self._prefill_planner.requeue_examined()
        sequence = self.queues.by_key.get(key)
        if sequence is None or sequence.padded_row.is_finished or sequence.state is SequenceState.FINISHING:
            return None
        had_credit = sequence.has_credit
        sequence.credit_tokens = max(sequence.credit_tokens, credit_tokens)
        sequence.credit_last = sequence.credit_last or last
        if sequence.has_credit:
            if sequence.state is SequenceState.PAUSED:
                self.queues.queue_for_return(sequence)
                self.tally.of(sequence.service.name).num_waiting += 1
                self.policy.push(sequence, now_ns / 1e9)
            elif not had_credit:
                self.policy.push(sequence, now_ns / 1e9)
        elif sequence.credit_last and not sequence.pending:
            return CoreOutput(key, [], None, self._end(sequence, FinishReason.LENGTH, "credit_refused", now_ns))
        return None

    def abort(self, key: int, reason: FinishReason, *, now_ns: int) -> CoreOutput | None:
        """End a request now; its blocks are free when this returns."""
        self._prefill_planner.requeue_examined()
        sequence = self.queues.by_key.get(key)
        if sequence is None:
            self.speculative_prefill.abort(key, now_ns)
            return None
        if sequence.padded_row.is_finished and not sequence.pending:
            self._drop(sequence)
            return None
        row = sequence.padded_row
        sequence.padded_row = row._replace(num_reserved=0)  # an aborted row is not kept as a padding row
        return CoreOutput(key, [], None, self._end(sequence, reason, "", now_ns))

    def swap_costs(self, cost: SwapCost) -> None:
        """Set the measured cost of copies to the host tier."""
        self._preemptor.swap = cost

    def take_verdicts(self) -> tuple[list[CoreAdmission], list[CoreFailure]]:
        """Return the admissions and rejections since the last call."""
        return self._admission_queue.take_verdicts()

    # ── a step ──

    def plan(self, now_ns: int, *, may_prefill_ahead: bool = True) -> Plan:
        """Plan the next step.

        The plan is empty only if no request has credit, the strategy waits for more requests, or all requests that can
        continue wait for the running step; and if there is no speculative prefill to do or `may_prefill_ahead` is
        false.
        """
        rows = (not self.policy.sizes_chunks and self.limits.chunk_tokens) or self.limits.max_batch_tokens
        answers = self.limits.max_running if self.kv.answers_apart else None
        planner = StepPlanner(self.groups, rows, self.step_time, answers, self.encoder_work)
        self._preemptor.preempted = []
        self._plan_into(planner, now_ns)
        while not planner.num_rows and not self._running and self._preemptor.break_deadlock(now_ns):
            self._plan_into(planner, now_ns)
        if self.groups.count > 1:
            self._preemptor.free_stuck_groups(planner, self._running, now_ns)
        if may_prefill_ahead and not planner.num_rows and self.idle:
            self.speculative_prefill.plan_into(planner, now_ns)
        return planner.finish(self._preemptor.preempted, now_ns)

    def end_non_finite(self, now_ns: int, also: Iterable[int] = ()) -> list[NonFiniteEnd]:
        """End the requests whose values in the committed step were not finite, and the open requests in `also`.

        The contents of their blocks are removed from the prefix cache.
        """
        ended = []
        for key in dict.fromkeys([*self.output_processor.non_finite_keys, *also]):
            sequence = self.queues.by_key.get(key)
            if sequence is None:
                continue
            hashes = self.groups.of(sequence).invalidate(sequence)
            output = self.abort(key, FinishReason.ABORT, now_ns=now_ns)
            if output is not None and output.finish is not None:
                ended.append(NonFiniteEnd(key, sequence.request.submit.adapter, output.finish, hashes))
        self.output_processor.non_finite_keys.clear()
        self._retire_padding_rows()
        return ended

    def launched(self, plan: Plan) -> None:
        """Record that the step is running or queued on the device; except in a pipeline, the last one is committed.

        Blocks that it reads may be reassigned at once, since all later writes run after it.
        """
        assert len(self._running) < self._division.num_steps, "a step was launched before an earlier one was committed"
        self._running.append(plan)
        self._step_timing.launched(plan)
        self._prefill_planner.requeue_examined()
        self.groups.count_evicted()
        row, ended, is_pipelined = -1, SequenceState.ENDED, self._division.is_active
        for sequence, num_tokens, samples, _, embeds, draft in plan.chunks:
            first, row = row + 1, row + samples + (num_drafted := len(draft))
            if sequence.state is ended or (sequence.padded_row.is_finished and num_tokens):
                continue  # it ended after this step was planned
            self._computed(sequence, num_tokens - num_drafted)
            if num_drafted or (samples and is_pipelined):
                self.queues.verify(sequence)
            if samples:
                sequence.expect_token(first)
                request = sequence.request
                num_output = len(sequence.tokens) - request.num_prompt
                if num_output >= request.submit.max_tokens:
                    self._finishing(sequence)
                elif num_output >= sequence.credit_tokens:
                    self._pause_sequence(sequence)
            elif embeds:
                self._finishing(sequence)
        for chunk in plan.chunks[plan.num_decode :]:
            if self.queues.computed(chunk.sequence) or chunk.sequence in self.queues.verifying:
                self.policy.discard(chunk.sequence)  # it needs no more prefill
        if not plan.num_decode and plan.is_speculative_prefill:
            self.speculative_prefill.launched(plan, plan.planned_ns)
        if self._strategy.padded:
            self._retire_padding_rows()
        self.queues.invalidate_sums()

    def commit(
        self,
        plan: Plan,
        token_ids: list[int],
        logprobs: list[CoreLogprob | None],
        now_ns: int,
        embeddings: Iterable[bytes] = (),
        non_finite: frozenset[int] = frozenset(),
    ) -> list[CoreOutput]:
        """Process the result of a step.

        The arguments are those of `OutputProcessor.process`; `end_non_finite` ends the sequences whose results are not
        finite. A step that was not launched is launched first: nothing is planned while it runs.
        """
        if (prefills := self._prefill_planner).examined or prefills.stopped_early:
            prefills.requeue_examined()
        if not self._running:
            self.launched(plan)
        oldest = self._running.popleft()
        assert oldest is plan, "a step was committed before an earlier one"
        outputs, got_token = self.output_processor.process(plan, token_ids, logprobs, now_ns, embeddings, non_finite)
        self.output_tokens_total += len(got_token)
        self.policy.decoded(got_token)
        if self._strategy.padded:
            self._retire_padding_rows()
        self.queues.renew_sums()
        seconds = self._step_timing.committed(plan, now_ns)
        if plan.chunks and seconds > 0:
            self.step_time.observe(plan.shape, seconds)
        if plan.chunks and seconds > 0 and (plan.num_decode or not plan.is_speculative_prefill):
            self.policy.stepped(seconds, plan.shape, now_ns / 1e9)
            if plan.shape.prefill_rows:
                self.prefill_seconds_total += seconds
            else:
                self.decode_seconds_total += seconds
        return outputs

    # ── state ──

    def begun_ns(self, plan: Plan) -> int:
        """Return when a step that is not yet committed began to run: after its planning and the previous step's end."""
        return self._step_timing.begun_ns(plan)

    @property
    def num_running(self) -> int:
        return len(self.queues.running)

    @property
    def num_waiting(self) -> int:
        return len(self.queues.waiting) + len(self.queues.returning)

    @property
    def num_paused(self) -> int:
        return len(self.queues.paused)

    @property
    def idle(self) -> bool:
        return not self.queues.by_key

    @property
    def cached_tokens_total(self) -> int:
        return self._prefill_planner.cached_tokens_total

    @property
    def prompt_tokens_total(self) -> int:
        return self._prefill_planner.prompt_tokens_total

    def class_loads(self) -> list[ClassLoad]:
        """Return the state and counters of every class."""
        return self.tally.loads(self.policy.predicted_ttft_s(), self.queues.oldest_unix_s())

    # ── internal ──

    def _plan_into(self, planner: StepPlanner, now_ns: int) -> None:
        """Add decodes, then as much prefill as fits."""
        candidates = decoding = self._preemptor.secure_decodes(now_ns)
        division = self._division
        due_s, context = self.queues.sums_of(candidates)
        if not self._strategy.padded:  # the rows of a padded batch run together
            decoding = self.policy.decodes_of_step(candidates, context, now_ns / 1e9)
            decoding = division.decodes_of_step(decoding) if division.is_active else decoding
        if decoding is not candidates:
            due_s, context = self.queues.sums_of(decoding)
        planner.add_decodes(decoding, context)
        if division.is_active:
            due_s = division.earliest_due_s(due_s)
            planner.limit_prefill(division.max_prefill_rows())
        slack_s = due_s - self._step_timing.free_s(now_ns)
        if self.policy.num_queued and planner.rows_left > 0:
            queues, blocks = self.queues, (self.kv.pool.num_free, self.kv.pool.num_blocks)
            running = queues.running, queues.counts.worst_rank, *blocks, queues.remaining_output
            view = BatchView(planner.shape, slack_s, decoding, *running)
            self._fill(planner, view, now_ns)
        if self.speculator is not None:
            overlaps = bool(self._running) and not self._division.is_active  # in a pipeline, tokens are known
            self.speculator.extend(planner, due_s - self._step_timing.free_s(now_ns), now_ns, overlaps=overlaps)
        if not planner.num_rows or self.groups.count > 1:  # more may be preempted, or nothing is launched
            self._prefill_planner.requeue_examined()

    def _fill(self, planner: StepPlanner, view: BatchView, now_ns: int) -> None:
        joinable = self._strategy.joinable(self.queues, self.limits, now_ns)
        if self._strategy.padded:
            self._padded.fill(planner, joinable, now_ns)
        else:
            planner.limit_time(self.policy.step_budget(view, now_ns / 1e9))
            self._prefill_planner.fill(planner, view, joinable, now_ns)
            if not planner.num_rows and not self._running:
                self._prefill_planner.fill_empty(planner, now_ns / 1e9)

    def _pause_sequence(self, sequence: Sequence) -> None:
        self.queues.pause(sequence)
        self.tally.of(sequence.service.name).num_running -= 1

    def _computed(self, sequence: Sequence, num_tokens: int) -> None:
        state = sequence.kv
        start = state.num_computed
        end = start + num_tokens
        peak = state.peak_computed
        if start < peak:
            again = min(end, peak) - start
            state.num_recomputed += again
            self.recomputed_tokens_total += again
            self.tally.of(sequence.service.name).recomputed_tokens += again
        if end > peak:
            state.peak_computed = end
        state.num_computed = end
        if end // self.kv.block_size > state.num_sealed:
            self.groups.of(sequence).seal(sequence)
            self.queues.filled[sequence] = None

    # ── end of requests ──

    def _end(
        self, sequence: Sequence, reason: FinishReason, detail: str, now_ns: int, embedding: bytes = b""
    ) -> CoreFinish:
        sequence.timeline.finished_unix_ns = now_ns
        sequence.forgo_token()
        if reason not in (FinishReason.ABORT, FinishReason.PREFILL_DONE) and detail != "credit_refused":
            self.lengths.learn(sequence.request.tenant, sequence.num_output)
        is_running = sequence.state is SequenceState.RUNNING
        if sequence.padded_row.num_reserved and sequence.num_output and is_running:  # its batch continues
            if not sequence.padded_row.is_finished:
                self.queues.keep_as_padding(sequence)
        else:
            self._drop(sequence)
        return finish_of(sequence, reason, detail, embedding)

    def _drop(self, sequence: Sequence) -> None:
        tally = self.tally.of(sequence.service.name)
        if sequence.state is SequenceState.RUNNING:
            tally.num_running -= 1
        elif sequence.state in _QUEUED:
            tally.num_waiting -= 1
        self.policy.discard(sequence)
        self.policy.ended(sequence, sequence.timeline.finished_unix_ns / 1e9)
        if self.speculator is not None:
            self.speculator.ended(sequence)
        self.queues.end(sequence)
        self.groups.of(sequence).release(sequence)

    def _retire_padding_rows(self) -> None:
        """Release the blocks of a padded batch together once all of its rows have ended."""
        running = self.queues.running
        if running and all(sequence.padded_row.is_finished for sequence in running):
            for sequence in list(running):
                (self._remove_from_batch if sequence.pending else self._drop)(sequence)

    def _finishing(self, sequence: Sequence) -> None:
        """Handle a sequence for which the running step is the last."""
        if sequence.padded_row.num_reserved and not sequence.request.submit.embed:
            self.queues.keep_as_padding(sequence)
        else:
            self._remove_from_batch(sequence)

    def _remove_from_batch(self, sequence: Sequence) -> None:
        self.policy.discard(sequence)
        self.tally.of(sequence.service.name).num_running -= 1
        self.queues.finish(sequence)
        self.groups.of(sequence).release(sequence)

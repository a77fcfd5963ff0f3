"""Admission of new requests: the policy's decision, queueing or rejection, and the decisions kept for the caller."""

from __future__ import annotations

import math
from collections.abc import Callable

from moiety_engine.messages import CoreAdmission, CoreFailure, CoreSubmit
from moiety_engine.scheduling.policies.policy_interface import AdmissionDecision
from moiety_engine.scheduling.scheduler_state import SchedulerState
from moiety_engine.sequence import Sequence
from moiety_engine.structured_outputs.stepping import GrammarHandle
from moiety_wire.messages import FailureCode
from moiety_wire.roles import transfer_group
from moiety_wire.trace_events import EventKind, Reason


class AdmissionQueue:
    """Creates sequences from requests, in order of arrival. `drop` is called with each request that is shed."""

    def __init__(self, state: SchedulerState, max_waiting: int, drop: Callable[[Sequence], None]) -> None:
        self._kv, self._queues, self._encoder_work = state.kv, state.queues, state.encoder_work
        self._policy, self._tally = state.policy, state.tally
        self._max_waiting, self._drop = max_waiting, drop
        self._num_seen = 0
        self._admissions: list[CoreAdmission] = []
        self._failures: list[CoreFailure] = []

    def add(
        self,
        submit: CoreSubmit,
        *,
        seed: int,
        now_ns: int,
        received_ns: int,
        grammar: GrammarHandle | None = None,
        num_transferred_tokens: int = 0,
    ) -> None:
        """Queue a request or reject it."""
        sequence = Sequence(
            submit,
            order=self._num_seen,
            seed=seed,
            queued_unix_ns=now_ns,
            received_unix_ns=received_ns,
            answer_apart=self._kv.first.answers_apart,
            grammar=grammar,
        )
        self._num_seen += 1
        num_cached = self._kv.num_cached(sequence)
        encoding = self._encoder_work.cost_from(sequence.request.images, num_cached)
        sequence.kv.num_uncached = len(sequence.tokens) - num_cached + encoding
        sequence.define_deadlines()
        decision = self._decide(sequence, now_ns / 1e9)
        service = decision.service
        if service is not None and len(self._queues.waiting) >= self._max_waiting and not self._shed(service.rank):
            service, decision = None, self._policy.overflow(sequence)
        if service is None:
            self._tally.rejected(submit.service.name, decision.reason)
            self._failures.append(_refusal(submit.key, decision.reason, decision.retry_after_s))
            return
        if service is not sequence.service:
            sequence.service = service
            sequence.define_deadlines()
            sequence.timeline.note(now_ns, EventKind.DOWNGRADED, decision.reason)
            self._tally.of(submit.service.name).downgraded += 1
        sequence.timeline.note(now_ns, EventKind.ADMITTED, decision.reason)
        if submit.transfer_id:
            self._take_over(sequence, num_transferred_tokens, now_ns)
        tally = self._tally.of(service.name)
        tally.admitted += 1
        tally.num_waiting += 1
        self._admissions.append(CoreAdmission(submit.key, service.name, decision.reason, decision.predicted_ttft_s))
        self._queues.add(sequence)
        self._policy.arrived(sequence, now_ns / 1e9)
        if sequence.has_credit:
            self._policy.push(sequence, now_ns / 1e9)

    def take_verdicts(self) -> tuple[list[CoreAdmission], list[CoreFailure]]:
        """Return the admissions and rejections since the last call."""
        taken = self._admissions, self._failures
        self._admissions, self._failures = [], []
        return taken

    def _decide(self, sequence: Sequence, now_s: float) -> AdmissionDecision:
        """Return the admission decision; requests that another engine has admitted are always accepted."""
        if sequence.request.submit.transfer_id:
            return AdmissionDecision(sequence.service, Reason.PREFILL_DONE)
        if sequence.request.submit.resumed_ids is not None:
            return AdmissionDecision(sequence.service, Reason.FAILED_OVER)
        return self._policy.admit(sequence, now_s)

    def _take_over(self, sequence: Sequence, num_transferred_tokens: int, now_ns: int) -> None:
        """Take over a request whose prompt another engine computed. KV that was not transferred is computed again."""
        sequence.deadlines.take_over_first_token(sequence.service, now_ns / 1e9)
        sequence.kv.num_transferred_tokens = num_transferred_tokens
        sequence.kv.peak_computed = len(sequence.tokens) - 1
        if num_transferred_tokens:
            sequence.kv.group = transfer_group(sequence.request.submit.transfer_id, self._kv.count)
            sequence.kv.num_uncached = len(sequence.tokens) - num_transferred_tokens
        sequence.timeline.note(
            now_ns, EventKind.MIGRATED, Reason.TRANSFERRED if num_transferred_tokens else Reason.KV_LOST
        )

    def _shed(self, rank: int) -> bool:
        """Drop the newest of the least critical waiting requests for one of this rank.

        Return False if none is less critical.
        """
        victim = self._queues.newest_of_worst_rank()
        if victim is None or victim.service.rank <= rank:
            return False
        self._tally.rejected(victim.service.name, Reason.SHED)
        self._failures.append(_refusal(victim.key, Reason.SHED, self._policy.overflow(victim).retry_after_s))
        self._drop(victim)
        return True


def _refusal(key: int, reason: Reason, retry_after_s: float | None) -> CoreFailure:
    when = "later" if retry_after_s is None else f"in {math.ceil(retry_after_s)} s"
    message = f"the engine is at its limit for this class ({reason.value}); try again {when}"
    return CoreFailure(key, FailureCode.OVERLOADED, message, 0, reason, retry_after_s)

"""Steps of the scripted core: admission, queue, running requests, blocks and credit; a core without the model.

It keeps the real core's guarantees: the admission decision precedes the first token, credit is never exceeded, a
request without credit holds no batch slot, every request ends once, blocks are conserved. It uses no sockets and no
event loop.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import islice

from moiety_engine.messages import (
    CoreAbort,
    CoreAdapter,
    CoreAdmission,
    CoreEvent,
    CoreExtend,
    CoreFailure,
    CoreFinish,
    CoreFleetService,
    CoreForget,
    CoreHello,
    CoreLoad,
    CoreOutput,
    CoreShutdown,
    CoreSleep,
    CoreSlept,
    CoreState,
    CoreStep,
    CoreSubmit,
    ToCore,
    ToServer,
    TracedStep,
)
from moiety_engine.scheduling.queues.class_counters import ClassCounter
from moiety_engine.scripted.request import ScriptedRequest, count_event
from moiety_engine.scripted.script import Script, ScriptedDecision
from moiety_engine.steps.sampler import StepSampler
from moiety_wire.engine_load import ClassLoad
from moiety_wire.experts import ExpertLoad, ExpertLoadQuery, ScaleExpertRanks
from moiety_wire.messages import FailureCode, FinishReason
from moiety_wire.trace_events import EventKind, Reason, StepNote


class ScriptedEngine:
    """Scripted engine core; owns its requests. Single-threaded."""

    def __init__(self, script: Script, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.script = script
        self._clock_ns = clock_ns
        self._waiting: deque[ScriptedRequest] = deque()
        self._returning: deque[ScriptedRequest] = deque()  # have credit again and blocks; wait for a batch slot
        self._running: dict[int, ScriptedRequest] = {}
        self._paused: dict[int, ScriptedRequest] = {}  # without credit
        self._admissions: list[CoreAdmission] = []
        self._ended: list[CoreOutput] = []
        self._failures: list[CoreFailure] = []
        self._answers: list[ToServer] = []
        self._blocks_used = self._expert_ranks = 0
        self._counters = {"steps": 0, "prompt": 0, "output": 0, "requests": 0}
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._classes: defaultdict[str, ClassCounter] = defaultdict(ClassCounter)
        self._sampler = StepSampler(script.traced_steps_per_s)

    def hello(self) -> CoreHello:
        return CoreHello(
            state=CoreState.READY,
            family="scripted",
            max_context_tokens=self.script.max_context_tokens,
            vocab_size=self.script.vocab_size,
            max_num_logprobs=self.script.max_num_logprobs,
            dtype="none",
            device="none",
            embedding_width=0 if self.script.labels else self.script.embedding_width,
            generates=not self.script.labels,
            labels=self.script.labels,
            score_activation=("sigmoid" if len(self.script.labels) == 1 else "softmax") if self.script.labels else "",
        )

    def execute_commands(self, commands: Iterable[ToCore]) -> None:
        for command in commands:
            match command:
                case CoreSubmit():
                    self._submit(command)
                case CoreExtend():
                    request = self._find(command.key)
                    if request is not None:
                        self._extend(request, command)
                case CoreAbort():
                    request = self._find(command.key)
                    if request is not None:
                        self._ended.append(CoreOutput(command.key, [], None, self._end(request, command.reason, "")))
                case CoreSleep():
                    self._answers.append(CoreSlept(command.asleep))
                case ExpertLoadQuery():
                    now_s = self._clock_ns() // 10**9
                    self._answers.append(ExpertLoad(command.query_id, now_s, now_s))
                case ScaleExpertRanks():
                    self._expert_ranks = command.num_ranks
                case CoreAdapter() | CoreForget() | CoreFleetService():
                    pass  # the script answers without any model
                case CoreShutdown():
                    pass

    def take_answers(self) -> list[ToServer]:
        """Return the answers to sleep and wake commands, which take effect at once, and to expert queries.

        The scripted core has no experts.
        """
        answers, self._answers = self._answers, []
        return answers

    @property
    def has_work(self) -> bool:
        """Return whether a step now would do anything."""
        return bool(
            self._admissions or self._ended or self._failures or self._running or self._has_place()
        )  # a request without credit does not run

    def first_step_keys(self) -> list[int]:
        """Return the requests whose first token the next step would produce."""
        running = [
            request.key
            for request in self._running.values()
            if request.num_output == len(request.submit.resumed_ids or ())
        ]
        num_free = max(0, self.script.max_running - len(self._running))
        return running + [request.key for request in islice(self._waiting, num_free)]

    def step(self) -> CoreStep:
        """Admit waiting requests that fit, then give each running request its next tokens."""
        self._counters["steps"] += 1
        while self._has_place():
            self._start(self._returning.popleft() if self._returning else self._waiting.popleft())
        outputs, self._ended = self._ended, []
        failures, self._failures = self._failures, []
        admissions, self._admissions = self._admissions, []
        batch = list(self._running.values())
        if batch:
            kind = "decode" if all(request.num_output for request in batch) else "prefill"
            self._seconds[kind] += self.script.step_delay_s
        traced = [self._trace_step(batch)] if self._sampler.is_due(self._clock_ns()) else []
        outputs += [self._advance(request) for request in batch]
        return CoreStep(outputs, failures, self.load(), admissions, traced)

    def _trace_step(self, batch: list[ScriptedRequest]) -> TracedStep:
        """Return the trace of a step that is about to end."""
        now_ns = self._clock_ns()
        begun = [request for request in batch if not request.num_output]
        step = StepNote(
            trace_id=secrets.token_bytes(16),
            number=self._counters["steps"],
            begin_unix_ns=now_ns - round(self.script.step_delay_s * 1e9),
            end_unix_ns=now_ns,
            predicted_s=None,
            num_decodes=len(batch) - len(begun),
            num_prefills=len(begun),
            num_prefill_tokens=sum(len(request.submit.prompt_ids) for request in begun),
            num_preempted=0,
            num_output_tokens=len(batch) * self.script.tokens_per_step,
            num_waiting=len(self._waiting) + len(self._returning),
            kv_blocks_used=self._blocks_used,
            kv_blocks_total=self.script.num_blocks,
        )
        return TracedStep(step, [request.key for request in batch])

    def load(self) -> CoreLoad:
        return CoreLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._returning),
            num_paused=len(self._paused),
            kv_blocks_total=self.script.num_blocks,
            kv_blocks_used=self._blocks_used,
            kv_blocks_cached=0,
            block_size=self.script.block_size,
            steps_total=self._counters["steps"],
            prompt_tokens_total=self._counters["prompt"],
            cached_tokens_total=0,
            output_tokens_total=self._counters["output"],
            requests_total=self._counters["requests"],
            prefill_seconds_total=self._seconds["prefill"],
            decode_seconds_total=self._seconds["decode"],
            tenant_kv_blocks=self._tenant_blocks(),
            classes=self._class_loads(),
            expert_ranks=self._expert_ranks,
            requested_expert_ranks=self._expert_ranks,
        )

    def _tenant_blocks(self) -> dict[str, int]:
        held = Counter[str]()
        for request in (*self._running.values(), *self._paused.values(), *self._returning):
            held[request.submit.tenant_id] += request.num_blocks
        return dict(held)

    def _class_loads(self) -> list[ClassLoad]:
        waiting = Counter(request.served_class for request in (*self._waiting, *self._returning))
        running = Counter(request.served_class for request in self._running.values())
        predicted = self.script.predicted_ttft_s
        names = sorted({*self._classes, *predicted})
        oldest: dict[str, float] = {}
        for request in (*self._waiting, *self._returning):
            came_s = request.queued_unix_ns / 1e9
            oldest[request.served_class] = min(came_s, oldest.get(request.served_class, came_s))
        for name in names:
            self._classes[name].num_waiting, self._classes[name].num_running = waiting[name], running[name]
        return [self._classes[n].load(n, predicted.get(n, 0.0), oldest.get(n, 0.0)) for n in names]

    # ── coming in ──

    def _submit(self, submit: CoreSubmit) -> None:
        request = ScriptedRequest(submit, self.script, self._clock_ns())
        self._counters["requests"] += 1
        if request.num_blocks > self.script.num_blocks:
            message = f"the request needs {request.num_blocks} KV blocks, but the engine has {self.script.num_blocks}"
            self._reject(submit, ScriptedDecision(reason=Reason.KV_PEAK), message)
            return
        requested = submit.service.name
        verdict = None
        if submit.resumed_ids is None:  # requests that another engine has admitted are accepted
            verdict = next((v for v in self.script.verdicts if v.applies(requested, submit.tenant_id)), None)
        if verdict is not None and not verdict.downgrades:
            self._reject(
                submit, verdict, f"the engine cannot attain the SLO of class {requested!r} now; try again later"
            )
            return
        request.served_class, kind = requested, EventKind.ADMITTED
        reason = Reason.IN_TIME if submit.resumed_ids is None else Reason.FAILED_OVER
        if verdict is not None:
            reason = Reason.ACCEPTED_LATE
            if submit.fallback is not None:
                request.served_class, reason, kind = submit.fallback.name, verdict.reason, EventKind.DOWNGRADED
                self._classes[requested].downgraded += 1
        self._classes[request.served_class].admitted += 1
        predicted_s = self.script.predicted_ttft_s.get(request.served_class)
        self._admissions.append(CoreAdmission(submit.key, request.served_class, reason, predicted_s))
        request.events.append(CoreEvent(self._clock_ns(), kind, reason))
        self._waiting.append(request)

    def _reject(self, submit: CoreSubmit, verdict: ScriptedDecision, message: str) -> None:
        self._classes[submit.service.name].rejected[verdict.reason.value] += 1
        failure = CoreFailure(
            submit.key, FailureCode.OVERLOADED, message, reason=verdict.reason, retry_after_s=verdict.retry_after_s
        )
        self._failures.append(failure)

    def _extend(self, request: ScriptedRequest, command: CoreExtend) -> None:
        request.credit_tokens = max(request.credit_tokens, command.credit_tokens)
        request.credit_is_last |= command.last
        if request.can_go_on and self._paused.pop(request.key, None) is not None:
            self._returning.append(request)

    def _find(self, key: int) -> ScriptedRequest | None:
        queued = (request for request in (*self._waiting, *self._returning) if request.key == key)
        return self._running.get(key) or self._paused.get(key) or next(queued, None)

    def _has_place(self) -> bool:
        if len(self._running) >= self.script.max_running:
            return False
        free = self.script.num_blocks - self._blocks_used
        return bool(self._returning or (self._waiting and self._waiting[0].num_blocks <= free))

    # ── running ──

    def _start(self, request: ScriptedRequest) -> None:
        if not request.scheduled_unix_ns:
            request.scheduled_unix_ns = self._clock_ns()
            self._blocks_used += request.num_blocks
            self._counters["prompt"] += len(request.submit.prompt_ids)
            self._happen(request)
            scores = request.scores()
            if scores is not None:
                self._ended.append(CoreOutput(request.key, [], scores=scores))
        (self._running if request.can_go_on else self._paused)[request.key] = request

    def _advance(self, request: ScriptedRequest) -> CoreOutput:
        if request.submit.embed:
            return CoreOutput(request.key, [], None, self._end(request, FinishReason.STOP, "", request.embedding()))
        token_ids: list[int] = []
        finish = None
        while finish is None and len(token_ids) < self.script.tokens_per_step:
            if request.num_output < request.credit_tokens:
                token_ids.append(self._take_token(request))
                end = request.end_after(token_ids[-1])
                finish = None if end is None else self._end(request, *end)
            if request.num_output >= request.credit_tokens:
                if finish is None and request.credit_is_last:
                    finish = self._end(request, FinishReason.LENGTH, "credit_refused")
                elif finish is None:
                    self._paused[request.key] = self._running.pop(request.key)
                break
        return CoreOutput(request.key, token_ids, request.logprobs(token_ids), finish)

    def _take_token(self, request: ScriptedRequest) -> int:
        token_id = request.next_token()
        request.num_output += 1
        self._counters["output"] += 1
        request.first_token_unix_ns = request.first_token_unix_ns or self._clock_ns()
        self._happen(request)
        return token_id

    def _happen(self, request: ScriptedRequest) -> None:
        """Record the script's events that are due now."""
        for scripted in self.script.events:
            if scripted.after_tokens != request.num_output:
                continue
            others = (key for key in (*self._running, *self._paused) if key != request.key)
            other = next(others, 0) if scripted.names_another else 0
            event = CoreEvent(self._clock_ns(), scripted.kind, scripted.reason, other)
            request.events.append(event)
            num_recomputed = 0
            if scripted.kind is EventKind.RESUMED and scripted.reason is Reason.RECOMPUTE:
                num_recomputed = len(request.submit.prompt_ids) + request.num_output
            request.num_recomputed += num_recomputed
            count_event(self._classes[request.served_class], event, num_recomputed)

    def _end(self, request: ScriptedRequest, reason: FinishReason, detail: str, embedding: bytes = b"") -> CoreFinish:
        if request.scheduled_unix_ns:
            self._blocks_used -= request.num_blocks
        if self._running.pop(request.key, None) is None and self._paused.pop(request.key, None) is None:
            (self._returning if request in self._returning else self._waiting).remove(request)
        return request.finish(reason, detail, self._clock_ns(), embedding)

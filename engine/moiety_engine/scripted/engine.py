"""The scripted core's steps: a queue, running requests, blocks, credit; all of a core but the model.

It keeps the same promises as the real one: credit is never exceeded, every request ends once, blocks are conserved.
It knows no sockets and no event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from moiety_engine.messages import (
    CoreAbort,
    CoreExtend,
    CoreFailure,
    CoreFinish,
    CoreHello,
    CoreLoad,
    CoreLogprob,
    CoreOutput,
    CoreShutdown,
    CoreState,
    CoreStep,
    CoreSubmit,
    ToCore,
)
from moiety_engine.scripted.script import Script
from moiety_wire.messages import FailureCode, FinishReason


class _Request:
    """One request; owned by the ScriptedEngine."""

    def __init__(self, submit: CoreSubmit, script: Script) -> None:
        self.submit = submit
        self.answer = list(script.tokens) if script.tokens else submit.prompt_ids
        self.credit_tokens = submit.credit_tokens
        self.credit_is_last = False
        self.num_output = 0
        self.num_blocks = -(-(len(submit.prompt_ids) + submit.max_tokens) // script.block_size)
        self.scheduled_unix_ns = 0
        self.first_token_unix_ns = 0


class ScriptedEngine:
    """Owns its requests. One thread."""

    def __init__(self, script: Script, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.script = script
        self._clock_ns = clock_ns
        self._waiting: deque[_Request] = deque()
        self._running: dict[int, _Request] = {}
        self._ended: list[CoreOutput] = []
        self._failures: list[CoreFailure] = []
        self._blocks_used = 0
        self._counters = {"steps": 0, "prompt": 0, "output": 0, "requests": 0}

    def hello(self) -> CoreHello:
        return CoreHello(
            state=CoreState.READY,
            family="scripted",
            max_context_tokens=self.script.max_context_tokens,
            vocab_size=self.script.vocab_size,
            max_num_logprobs=self.script.max_num_logprobs,
            dtype="none",
            device="none",
        )

    def obey(self, commands: Iterable[ToCore]) -> None:
        for command in commands:
            match command:
                case CoreSubmit():
                    self._submit(command)
                case CoreExtend():
                    request = self._find(command.key)
                    if request is not None:
                        request.credit_tokens = max(request.credit_tokens, command.credit_tokens)
                        request.credit_is_last |= command.last
                case CoreAbort():
                    request = self._find(command.key)
                    if request is not None:
                        self._ended.append(CoreOutput(command.key, [], None, self._end(request, command.reason, "")))
                case CoreShutdown():
                    pass

    @property
    def has_work(self) -> bool:
        """Whether a step now would do anything."""
        return bool(
            self._ended
            or self._failures
            or any(self._can_go_on(request) for request in self._running.values())
            or (self._waiting and self._fits(self._waiting[0]))
        )

    def step(self) -> CoreStep:
        """Admit what fits, then give each running request its next tokens."""
        self._counters["steps"] += 1
        while self._waiting and self._fits(self._waiting[0]):
            request = self._waiting.popleft()
            request.scheduled_unix_ns = self._clock_ns()
            self._running[request.submit.key] = request
            self._blocks_used += request.num_blocks
            self._counters["prompt"] += len(request.submit.prompt_ids)
        outputs, self._ended = self._ended, []
        failures, self._failures = self._failures, []
        outputs += [self._advance(request) for request in list(self._running.values()) if self._can_go_on(request)]
        return CoreStep(outputs, failures, self.load())

    def load(self) -> CoreLoad:
        return CoreLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_paused=sum(request.num_output >= request.credit_tokens for request in self._running.values()),
            kv_blocks_total=self.script.num_blocks,
            kv_blocks_used=self._blocks_used,
            kv_blocks_cached=0,
            block_size=self.script.block_size,
            steps_total=self._counters["steps"],
            prompt_tokens_total=self._counters["prompt"],
            cached_tokens_total=0,
            output_tokens_total=self._counters["output"],
            requests_total=self._counters["requests"],
        )

    def _submit(self, submit: CoreSubmit) -> None:
        request = _Request(submit, self.script)
        self._counters["requests"] += 1
        if request.num_blocks > self.script.num_blocks:
            message = f"the request needs {request.num_blocks} KV blocks, the engine has {self.script.num_blocks}"
            self._failures.append(CoreFailure(submit.key, FailureCode.OVERLOADED, message))
        else:
            self._waiting.append(request)

    def _find(self, key: int) -> _Request | None:
        return self._running.get(key) or next((r for r in self._waiting if r.submit.key == key), None)

    def _fits(self, request: _Request) -> bool:
        free = self.script.num_blocks - self._blocks_used
        return len(self._running) < self.script.max_running and request.num_blocks <= free

    @staticmethod
    def _can_go_on(request: _Request) -> bool:
        return request.num_output < request.credit_tokens or request.credit_is_last

    def _advance(self, request: _Request) -> CoreOutput:
        token_ids: list[int] = []
        finish = None
        while finish is None and len(token_ids) < self.script.tokens_per_step:
            if request.num_output < request.credit_tokens:
                token_ids.append(self._next_token(request))
                request.num_output += 1
                self._counters["output"] += 1
                request.first_token_unix_ns = request.first_token_unix_ns or self._clock_ns()
                finish = self._finish_after(request, token_ids[-1])
            if request.num_output >= request.credit_tokens:
                if finish is None and request.credit_is_last:
                    finish = self._end(request, FinishReason.LENGTH, "credit_refused")
                break
        return CoreOutput(request.submit.key, token_ids, self._logprobs(request, token_ids), finish)

    def _next_token(self, request: _Request) -> int:
        at, submit = request.num_output, request.submit
        is_over = at >= len(request.answer) and at >= submit.min_tokens
        if is_over and self.script.end_token_id in submit.stop_token_ids:
            return self.script.end_token_id
        return request.answer[at % len(request.answer)]

    def _finish_after(self, request: _Request, token_id: int) -> CoreFinish | None:
        submit = request.submit
        if token_id in submit.stop_token_ids and request.num_output > submit.min_tokens:
            return self._end(request, FinishReason.STOP, "")
        if request.num_output >= submit.max_tokens:
            return self._end(request, FinishReason.LENGTH, "max_tokens")
        return None

    def _logprobs(self, request: _Request, token_ids: list[int]) -> list[CoreLogprob] | None:
        """Made up, but in order: the chosen token is the best, its followers in the vocabulary come next."""
        count = request.submit.sampling.num_logprobs
        if count is None:
            return None
        size = self.script.vocab_size
        return [
            CoreLogprob(-0.5, [(t + i) % size for i in range(count)], [-0.5 - i for i in range(count)])
            for t in token_ids
        ]

    def _end(self, request: _Request, reason: FinishReason, detail: str) -> CoreFinish:
        if self._running.pop(request.submit.key, None) is not None:
            self._blocks_used -= request.num_blocks
        else:
            self._waiting.remove(request)
        return CoreFinish(
            reason=reason,
            detail=detail,
            num_cached_tokens=0,
            num_output_tokens=request.num_output,
            scheduled_unix_ns=request.scheduled_unix_ns,
            first_token_unix_ns=request.first_token_unix_ns,
            finished_unix_ns=self._clock_ns(),
        )

"""Step loop of an encoder: each step takes whole inputs up to the token budget and ends them with their vectors."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from moiety_engine.encoder.input_queue import EncoderQueue
from moiety_engine.messages import (
    CoreAdmission,
    CoreEvent,
    CoreFailure,
    CoreFinish,
    CoreHello,
    CoreLoad,
    CoreOutput,
    CoreState,
    CoreStep,
    CoreSubmit,
)
from moiety_wire.engine_load import ClassLoad
from moiety_wire.messages import FailureCode, FinishReason
from moiety_wire.trace_events import EventKind, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_engine.encoder.network import EncoderNetwork
    from moiety_engine.first_steps import FirstSteps

MAX_BATCH_TOKENS = 8192
MAX_INPUTS = 256
RETRY_AFTER_S = 1.0


class EncoderLoop:
    """One encoder on one device. Not thread-safe: one thread submits requests and runs steps."""

    def __init__(
        self,
        network: EncoderNetwork,
        *,
        max_batch_tokens: int | None = None,
        max_inputs: int | None = None,
        queue: EncoderQueue | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.network = network
        self.first_steps: FirstSteps | None = None
        self._max_batch_tokens = max_batch_tokens or MAX_BATCH_TOKENS
        self._max_inputs = max_inputs or MAX_INPUTS
        self._clock_ns = clock_ns
        self._queue = EncoderQueue() if queue is None else queue
        self._outputs: list[CoreOutput] = []
        self._failures: list[CoreFailure] = []
        self._admissions: list[CoreAdmission] = []
        self._admitted = Counter[str]()
        self._rejected: dict[str, Counter[str]] = {}  # by class: reasons
        self._steps_total = self._prompt_tokens_total = self._requests_total = 0
        self._prefill_seconds_total = 0.0

    def hello(self) -> CoreHello:
        """Return the properties of the model for the engine server's model card."""
        spec = self.network.spec
        return CoreHello(
            state=CoreState.READY,
            family=spec.family,
            max_context_tokens=spec.max_context_tokens,
            vocab_size=spec.vocab_size,
            dtype=str(self.network.dtype).removeprefix("torch."),
            device=str(self.network.device),
            embedding_width=0 if spec.labels else spec.hidden_size,
            generates=False,
            unit_vectors=spec.pooling.normalizes,
            labels=spec.labels,
            score_activation=str(spec.activation) if spec.labels else "",
        )

    def warm_up(self) -> None:
        """Run one short input, whose one-time work the first request would otherwise pay for."""
        self.network.run([([0, 0], 1)])

    def submit(self, submit: CoreSubmit) -> None:
        """Queue an input. A request to generate, or for which there is no room, fails with the next step."""
        self._requests_total += 1
        if not submit.embed:
            message = "an encoder generates no text; send chats and completions to another model"
            self._failures.append(CoreFailure(submit.key, FailureCode.INVALID_REQUEST, message))
            return
        refusal = self._queue.find_refusal(submit)
        if refusal is not None:
            self._refuse(submit, refusal)
            return
        for shed in self._queue.shed_for(submit):
            self._refuse(shed, Reason.SHED)
        name = submit.service.name
        reason = Reason.IN_TIME if submit.resumed_ids is None else Reason.FAILED_OVER
        self._admissions.append(CoreAdmission(submit.key, name, reason, None))
        self._admitted[name] += 1
        self._queue.append(submit)

    def abort(self, key: int, reason: FinishReason) -> None:
        """End an input that waits."""
        submit = self._queue.remove(key)
        if submit is not None:
            now_ns = self._clock_ns()
            self._outputs.append(CoreOutput(key, [], None, self._finish(submit, reason, 0, now_ns)))

    def step(self) -> bool:
        """Compute waiting inputs up to the token budget. Return False if there were none."""
        begun_ns = self._clock_ns()
        batch = self._queue.take(self._max_batch_tokens, self._max_inputs, begun_ns)
        if not batch:
            return False
        if self.first_steps is not None:
            self.first_steps.write(submit.key for submit in batch)
        begun_s = time.monotonic()
        rows_NE = self.network.run([(one.prompt_ids, one.second_segment_at) for one in batch]).numpy()
        self._prefill_seconds_total += time.monotonic() - begun_s
        self._steps_total += 1
        now_ns = self._clock_ns()
        for submit, row_E in zip(batch, rows_NE.astype("<f4", copy=False), strict=True):
            self._prompt_tokens_total += len(submit.prompt_ids)
            if not np.isfinite(row_E).all():
                message = "the model computed values that are not finite: check the checkpoint's weights"
                self._failures.append(CoreFailure(submit.key, FailureCode.NON_FINITE, message))
                continue
            finish = self._finish(submit, FinishReason.STOP, begun_ns, now_ns, row_E.tobytes())
            self._outputs.append(CoreOutput(submit.key, [], None, finish))
        return True

    def take_outputs(self) -> CoreStep | None:
        """Return what happened since the last call; None if nothing did."""
        if not (self._outputs or self._failures or self._admissions):
            return None
        step = CoreStep(self._outputs, self._failures, self.load(), self._admissions)
        self._outputs, self._failures, self._admissions = [], [], []
        return step

    def load(self) -> CoreLoad:
        """Return the load figures. There is no KV cache."""
        waiting = Counter(submit.service.name for submit in self._queue.waiting)
        return CoreLoad(
            num_running=0,
            num_waiting=len(self._queue),
            num_paused=0,
            kv_blocks_total=0,
            kv_blocks_used=0,
            kv_blocks_cached=0,
            block_size=1,
            steps_total=self._steps_total,
            prompt_tokens_total=self._prompt_tokens_total,
            cached_tokens_total=0,
            output_tokens_total=0,
            requests_total=self._requests_total,
            max_batch_tokens=self._max_batch_tokens,
            max_running=self._max_inputs,
            prefill_seconds_total=self._prefill_seconds_total,
            classes=[
                _class_load(name, waiting[name], self._admitted[name], dict(self._rejected.get(name, {})))
                for name in sorted(self._admitted.keys() | self._rejected.keys())
            ],
        )

    def _refuse(self, submit: CoreSubmit, reason: Reason) -> None:
        self._rejected.setdefault(submit.service.name, Counter())[reason.value] += 1
        message = f"the engine's queue is full ({reason.value}); try again later"
        self._failures.append(CoreFailure(submit.key, FailureCode.OVERLOADED, message, 0, reason, RETRY_AFTER_S))

    def _finish(
        self, submit: CoreSubmit, reason: FinishReason, begun_ns: int, now_ns: int, vector: bytes = b""
    ) -> CoreFinish:
        events = (CoreEvent(submit.arrival_unix_ns, EventKind.ADMITTED, Reason.IN_TIME),)
        return CoreFinish(reason, "", 0, 0, begun_ns, 0, now_ns, submit.service.name, events, 0, embedding=vector)


def _class_load(name: str, num_waiting: int, num_admitted: int, rejected: dict[str, int]) -> ClassLoad:
    return ClassLoad(
        name=name,
        num_waiting=num_waiting,
        num_running=0,
        predicted_ttft_s=0.0,
        admitted_total=num_admitted,
        rejected_total=rejected,
        downgraded_total=0,
        preempted_total={},
        demoted_total=0,
        boosted_total=0,
        recomputed_tokens_total=0,
        oldest_waiting_unix_s=0.0,
    )

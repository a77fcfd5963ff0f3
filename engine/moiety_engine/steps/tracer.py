"""Traces of sampled steps: the composition of each.

An unsampled step costs one comparison. Traces are taken with the outputs of their step; of untaken ones, the last few
are kept.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from operator import attrgetter

import msgspec

from moiety_engine.messages import CoreOutput, TracedStep
from moiety_engine.moe.history import ExpertPace
from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_engine.steps.sampler import StepSampler
from moiety_wire.trace_events import StepNote

MAX_KEPT = 16

_KEY = attrgetter("sequence.request.submit.key")  # a batch may have hundreds of chunks, and the next step waits


class StepTracer:
    """Tracer of steps, owned by the loop."""

    def __init__(self, per_s: float) -> None:
        self.is_due = StepSampler(per_s).is_due  # of a time in ns: whether to trace the step that ends now
        self.kept: deque[TracedStep] = deque(maxlen=MAX_KEPT)
        self._ended: TracedStep | None = None

    def ended(self, plan: Plan, scheduler: Scheduler, number: int, now_ns: int, experts: ExpertPace | None) -> None:
        """Record a step that has ended but is not yet committed: its requests still have the state of that step."""
        keys = list(map(_KEY, plan.chunks))
        self._ended = TracedStep(_step(plan, scheduler, number, now_ns, experts), keys)

    def committed(self, outputs: Iterable[CoreOutput]) -> None:
        """Add the step's output tokens: with speculative decoding they are known only at the commit."""
        if self._ended is not None:
            num_tokens = sum(len(output.token_ids) for output in outputs)
            step = msgspec.structs.replace(self._ended.step, num_output_tokens=num_tokens)
            self.kept.append(TracedStep(step, self._ended.keys))
            self._ended = None

    def take(self) -> list[TracedStep]:
        """Return the steps traced since the last call."""
        kept = list(self.kept)
        self.kept.clear()
        return kept


def _step(plan: Plan, scheduler: Scheduler, number: int, now_ns: int, experts: ExpertPace | None) -> StepNote:
    prefills = plan.chunks[plan.num_decode :]
    return StepNote(
        trace_id=secrets.token_bytes(16),
        number=number,
        begin_unix_ns=scheduler.begun_ns(plan),
        end_unix_ns=now_ns,
        predicted_s=scheduler.step_time.predict_s(plan.shape),
        num_decodes=plan.num_decode,
        num_prefills=len(prefills),
        num_prefill_tokens=sum(chunk.num_tokens for chunk in prefills),
        num_preempted=len(plan.preempted),
        num_output_tokens=0,
        num_waiting=scheduler.num_waiting,
        kv_blocks_used=scheduler.groups.num_used,
        kv_blocks_total=scheduler.groups.num_blocks,
        active_experts=None if experts is None else experts.active,
        balancedness=None if experts is None else experts.balancedness,
    )

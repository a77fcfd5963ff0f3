"""Division of the work among the steps that are in the pipeline at once, so that no stage waits for the others.

Each step gets about the same decode work, and a part of the prompt tokens. The chunks of a prompt may be in successive
steps, since they need no sampled token; a decoding sequence is in one step at a time.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moiety_engine.scheduling.limits import SchedulerLimits
    from moiety_engine.scheduling.plan import Chunk
    from moiety_engine.scheduling.queues.request_queues import RequestQueues
    from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel
    from moiety_engine.sequence import Sequence

_CHUNKS_PER_STEP = 2  # a prompt is cut into more chunks than stages, since the first and the last chunk fill no stage
_ROUNDING = 1e-6


class PipelineDivision:
    """Shares of the steps in a pipeline. With one step in flight, nothing is divided."""

    def __init__(self, queues: RequestQueues, step_time: StepTimeModel, limits: SchedulerLimits) -> None:
        self._queues, self._step_time, self._limits = queues, step_time, limits
        self.num_steps = limits.steps_in_flight
        self.is_active = self.num_steps > 1  # several steps are in flight: a sequence waits for its sampled token

    def decodes_of_step(self, decoding: list[Chunk]) -> list[Chunk]:
        """Return the decodes of the next step, in the same order: an equal part of the work of each rank group.

        Better classes and earlier deadlines come first. A sequence that is left out waits at most until all other steps
        have been planned once, because these then have all of the other work.
        """
        if not self.is_active or not decoding:
            return decoding
        row_s, token_s = self._step_time.decode_costs()

        def work(sequence: Sequence) -> float:
            return row_s + token_s * sequence.kv.num_computed

        left: dict[int, float] = {}  # of each group: the step's share of the work
        for sequence in chain((chunk.sequence for chunk in decoding), self._queues.verifying):
            group = sequence.kv.group
            left[group] = left.get(group, 0.0) + work(sequence) / self.num_steps
        chosen: set[Sequence] = set()
        for chunk in sorted(decoding, key=_first_served):
            sequence = chunk.sequence
            group, own = sequence.kv.group, work(sequence)
            if left[group] > _ROUNDING * own:
                left[group] -= own
                chosen.add(sequence)
        return [chunk for chunk in decoding if chunk.sequence in chosen]

    def max_prefill_rows(self) -> int:
        """Return how many prompt tokens the next step may have."""
        most = self._limits.max_batch_tokens
        if not self.is_active:
            return most
        queues, num_parts = self._queues, _CHUNKS_PER_STEP * self.num_steps
        num_left = 0
        for sequence in chain(queues.prefilling, queues.returning, queues.waiting.values()):
            num_left += sequence.num_uncomputed
            if num_left >= most * num_parts:
                return most
        return min(most, max(self._limits.min_chunk_tokens, -(-num_left // num_parts)))

    def earliest_due_s(self, due_s: float) -> float:
        """Return the earliest deadline that the next step may delay.

        `due_s` is that of its own decodes. The sequences in flight decode again in a step after it.
        """
        waiting = self._queues.verifying if self.is_active else ()
        return min([due_s, *(sequence.deadlines.next_due_s for sequence in waiting)])


def _first_served(chunk: Chunk) -> tuple[int, float, int]:
    sequence = chunk.sequence
    return sequence.service.rank, sequence.deadlines.next_due_s, sequence.request.order

"""Size limits of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_engine.images.encoder_cost import NO_ENCODER, EncoderCost


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of a step, of the batch and of the queue."""

    max_batch_tokens: int
    max_running: int
    batch_size: int = 8
    batch_timeout_ms: float = 0.0
    max_waiting: int = 32768
    chunk_tokens: int | None = None  # rows per step if the policy does not size steps by time; None: max_batch_tokens
    encoder_cost: EncoderCost = NO_ENCODER
    batches_experts: bool = False  # as in PolicyContext
    steps_in_flight: int = 1  # steps in a pipeline of ranks at once
    min_chunk_tokens: int = 128  # of a pipeline's steps: prompts are not cut into smaller chunks to fill more steps

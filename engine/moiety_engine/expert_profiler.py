"""Profiles of the experts that requests and the engine's steps use, for gateways that route by experts.

Every few steps, the experts of the decoded tokens are added to the profiles of their requests, and their union to the
profile of the engine. Prompt tokens do not count: a step with a long prompt reads nearly all experts anyway. Only some
layers count, so that a profile has at most SKETCH_BITS experts. P parts of a step, L layers, W words of 64 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_wire.expert_profile import ExpertProfile

if TYPE_CHECKING:
    import numpy as np

    from moiety_engine.moe.shape import ExpertShape
    from moiety_engine.scheduling.plan import Plan

SKETCH_BITS = 1024  # unless one layer has more experts
STEPS_PER_SAMPLE = 4
_WORD_BITS = 64


class ExpertProfiler:
    """Owner of the engine's profile. Used by the step loop's thread only."""

    def __init__(self, shape: ExpertShape) -> None:
        num_words = -(-shape.num_experts // _WORD_BITS)
        self.layers = sketch_layers(len(shape.layers), num_words)
        self._num_bytes = len(self.layers) * num_words * _WORD_BITS // 8
        self._active = ExpertProfile(self._num_bytes)
        self._num_steps = 0

    def sample(self, plan: Plan, bits_PLW: np.ndarray) -> None:
        """Take a step with the experts of its parts' last tokens; every STEPS_PER_SAMPLE-th with decodes counts."""
        if not plan.num_decode:
            return
        self._num_steps += 1
        if self._num_steps % STEPS_PER_SAMPLE:
            return
        size, data = self._num_bytes, bits_PLW[: plan.num_decode, self.layers].tobytes()
        union = 0
        for number, chunk in enumerate(plan.chunks[: plan.num_decode]):
            experts = int.from_bytes(data[number * size : (number + 1) * size], "little")
            union |= experts
            use = chunk.sequence.experts
            if use.profile is None:
                use.profile = ExpertProfile(size)
            use.profile.add(experts)
        self._active.add(union)

    def pack_active(self, num_running: int) -> bytes:
        """Return the profile of recent steps; b"" if no request runs, which also clears the profile."""
        if not num_running:
            self._active = ExpertProfile(self._num_bytes)
        return self._active.pack()


def sketch_layers(num_layers: int, num_words: int) -> list[int]:
    """Return the places of the layers that count: as many as fit, from the first to the last at even distances."""
    count = max(1, min(num_layers, SKETCH_BITS // (num_words * _WORD_BITS)))
    return [(2 * i + 1) * num_layers // (2 * count) for i in range(count)]

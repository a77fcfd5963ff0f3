"""Bytes of experts that requests read and moved, metered after each step.

A step reads the weights of each active expert of a layer once, and these bytes are divided among the tokens that chose
the expert (`moiety_kernels.expert_count`). Loads of offloaded experts are divided among the tokens that needed or were
predicted to need the expert; moves between ranks among the requests of the next step, by the bytes that they read.
Amounts are whole bytes, and nothing is lost: the totals are the sums over requests and what no request is charged for,
which are tokens of requests that had already ended, the warm-up, and loads of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from moiety_engine.expert_profiler import ExpertProfiler
    from moiety_engine.moe.load import StepExperts
    from moiety_engine.scheduling.plan import Plan


class ExpertMeter:
    """Owner of the totals of metered bytes. Used by the step loop's thread only."""

    def __init__(self, profiler: ExpertProfiler | None = None) -> None:
        self.profiler = profiler  # None: no profiles are sampled
        self.read_bytes_total = 0  # by all tokens
        self.charged_read_bytes_total = 0  # charged to requests
        self.charged_moved_bytes_total = 0
        self._uncharged_moves = 0  # bytes moved between ranks that the next step's requests are charged for

    def add_moves(self, num_bytes: int) -> None:
        """Charge the next step's requests for experts that moved between ranks."""
        self._uncharged_moves += num_bytes

    def charge(self, plan: Plan, experts: StepExperts) -> None:
        """Charge the requests of a step that is not yet committed. Requests that have ended are not charged."""
        read = experts.bytes_P.tolist()
        self.read_bytes_total += sum(read)
        charged = 0
        for chunk, num_bytes in zip(plan.chunks, read, strict=True):
            sequence = chunk.sequence
            if num_bytes and not sequence.timeline.finished_unix_ns:
                sequence.experts.read_bytes += num_bytes
                charged += num_bytes
        self.charged_read_bytes_total += charged
        if experts.bits_PLW is not None:
            _predict(plan, experts.bits_PLW)
            if self.profiler is not None:
                self.profiler.sample(plan, experts.bits_PLW)
        if experts.moved_P is not None:
            self._charge_moves(plan, experts.moved_P.tolist())
        if self._uncharged_moves and charged:
            open_read = [
                0 if chunk.sequence.timeline.finished_unix_ns else num_bytes
                for chunk, num_bytes in zip(plan.chunks, read, strict=True)
            ]
            self._charge_moves(plan, divide_bytes(self._uncharged_moves, open_read))
            self._uncharged_moves = 0

    def metrics(self) -> dict[str, int]:
        """Return the meter's fields of CoreLoad."""
        return {
            "expert_read_bytes_total": self.read_bytes_total,
            "charged_expert_read_bytes_total": self.charged_read_bytes_total,
            "charged_expert_moved_bytes_total": self.charged_moved_bytes_total,
        }

    def _charge_moves(self, plan: Plan, moved: list[int]) -> None:
        for chunk, num_bytes in zip(plan.chunks, moved, strict=True):
            sequence = chunk.sequence
            if num_bytes and not sequence.timeline.finished_unix_ns:
                sequence.experts.moved_bytes += num_bytes
                self.charged_moved_bytes_total += num_bytes


def _predict(plan: Plan, bits_PLW: np.ndarray) -> None:
    """Note the experts of each chunk's last token as the prediction for its sequence's next one."""
    size, data = bits_PLW[0].nbytes, bits_PLW.tobytes()
    for number, chunk in enumerate(plan.chunks):
        experts = int.from_bytes(data[number * size : (number + 1) * size], "little")
        if experts:
            chunk.sequence.experts.predicted = experts


def divide_bytes(num_bytes: int, weights: Sequence[int]) -> list[int]:
    """Divide bytes in proportion to the weights, in whole bytes whose sum is `num_bytes`.

    Each part is rounded down, and the largest weight gets the rest. At least one weight must be positive.
    """
    total = sum(weights)
    parts = [num_bytes * weight // total for weight in weights]
    parts[max(range(len(weights)), key=weights.__getitem__)] += num_bytes - sum(parts)
    return parts

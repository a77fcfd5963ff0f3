"""The weights of a replica's models, of one or of two, on all ranks: how they leave and come back together."""

from __future__ import annotations

from collections.abc import Callable

from moiety_engine.errors import OutOfMemory, RanksError
from moiety_engine.model.transformer import Transformer
from moiety_engine.runner.control_messages import ControlSender, OffloadWeights, ReloadWeights

Progress = Callable[[], None]


class Weights:
    """Used by the step loop's thread only."""

    def __init__(self, models: list[Transformer], orders: ControlSender) -> None:
        self._models, self._orders = models, orders

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Of all their caches."""
        return sum(model.kv_bytes_per_block(block_size) for model in self._models)

    def settle(self, timeout_s: float) -> None:
        """Wait until they lie as they are read fastest, or as long as that for each model."""
        for model in self._models:
            model.settle(timeout_s)

    def leave(self, on_progress: Progress) -> int:
        """Those that are there go to host memory, on all ranks; returns the bytes that are free thereby. Raises
        OutOfMemory."""
        with self._orders.together(OffloadWeights()):
            return sum(model.leave(on_progress) for model in self._models if not model.away)

    def leave_or_stay(self, on_progress: Progress) -> int:
        """All of them, or none. Raises OutOfMemory, and RanksError where not even that can be had."""
        try:
            return self.leave(on_progress)
        except OutOfMemory:
            try:
                self.reload_weights(on_progress)
            except OutOfMemory as exc:
                raise RanksError(f"some ranks have put their weights away, and cannot take them back: {exc}") from exc
            raise

    def reload_weights(self, on_progress: Progress) -> None:
        """Those that are away. Raises OutOfMemory."""
        with self._orders.together(ReloadWeights()):
            for model in self._models:
                if model.away:
                    model.reload_weights(on_progress)

"""Offloading and reloading of the weights of a replica's model, and its draft model, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from moiety_engine.errors import OutOfMemory, RanksError, SleepFileError
from moiety_engine.model.transformer import Transformer
from moiety_engine.runner.control_messages import ControlSender, OffloadWeights, ReloadWeights

if TYPE_CHECKING:
    from moiety_engine.runner.checkpoint_weights import CheckpointWeights

Progress = Callable[[], None]


class Weights:
    """Weights of a replica's models. Used by the step loop's thread only."""

    def __init__(
        self, models: list[Transformer], controls: ControlSender, sleep_folder: str, checkpoint: CheckpointWeights
    ) -> None:
        """Create the mover. `sleep_folder` is where offloaded weights are stored; "" for host memory.

        `checkpoint` loads weights whose file cannot be read.
        """
        self._models, self._controls, self._folder, self._checkpoint = models, controls, sleep_folder, checkpoint

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of a block in the caches of all models."""
        return sum(model.kv_bytes_per_block(block_size) for model in self._models)

    def settle(self, timeout_s: float) -> None:
        """Wait until the weights have the memory layout that is fastest to read, at most `timeout_s` per model."""
        for model in self._models:
            model.settle(timeout_s)

    def offload_weights(self, on_progress: Progress) -> int:
        """Offload the loaded weights, on all ranks, and return the bytes freed. Raises OutOfMemory."""
        with self._controls.run_on_all_ranks(OffloadWeights(self._folder)):
            on_device = [model for model in self._models if not model.is_offloaded]
            return sum(model.offload_weights(on_progress, self._folder) for model in on_device)

    def offload_or_restore(self, on_progress: Progress) -> int:
        """Offload the weights of all ranks, or of none, and return the bytes freed.

        Raises OutOfMemory if nothing was offloaded, and RanksError if some ranks cannot reload their weights.
        """
        try:
            return self.offload_weights(on_progress)
        except OutOfMemory:
            try:
                self.reload_weights(on_progress)
            except (OutOfMemory, SleepFileError) as exc:
                raise RanksError(f"some ranks have offloaded their weights and cannot load them again: {exc}") from exc
            raise

    def reload_weights(self, on_progress: Progress) -> None:
        """Reload the offloaded weights. Raises OutOfMemory or SleepFileError."""
        with self._controls.run_on_all_ranks(ReloadWeights()):
            for number, model in enumerate(self._models):
                if model.is_offloaded:
                    load = partial(self._checkpoint.load, self._models, number, on_progress)
                    model.reload_weights(on_progress, load)

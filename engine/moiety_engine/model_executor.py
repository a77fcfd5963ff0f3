"""The model of a replica with its state on the device, which a sleeping replica gives up.

It owns the weights, the KV cache and the runner, those of a draft model too, and the control of the other ranks. It
knows nothing of requests and of scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.runner.control_messages import Release
from moiety_engine.runner.device_state import DeviceState, free_cached_memory
from moiety_engine.runner.weights import Weights

if TYPE_CHECKING:
    from moiety_engine.adapters.adapter_slots import AdapterSlots
    from moiety_engine.kv_transfer.connector import KvConnector
    from moiety_engine.model.transformer import Transformer
    from moiety_engine.moe.tenants import TenantSlots
    from moiety_engine.mtp_and_draft_model.draft_model import DraftModel
    from moiety_engine.runner.checkpoint_weights import CheckpointWeights
    from moiety_engine.runner.control_messages import ControlSender
    from moiety_engine.runner.micro_batches import StepSplit
    from moiety_engine.runner.sizes import Sizes


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """Objects that the state on the device is connected to."""

    kv_connector: KvConnector  # transfers KV to and from other engines
    adapters: AdapterSlots
    tenants: TenantSlots | None  # slots by which the load of experts is counted; None for a model without experts
    num_mask_words: int  # of a token mask of structured outputs; 0 without them
    cutting: StepSplit
    sleep_folder: str  # for the weights of a sleeping replica; "": host memory
    checkpoint: CheckpointWeights  # loads the weights if their file there cannot be read


class ModelExecutor:
    """Model, draft model and device state. Used by the step loop's thread only."""

    def __init__(
        self,
        model: Transformer,
        draft: DraftModel | None,
        sizes: Sizes,
        controls: ControlSender,
        options: DeviceOptions,
        *,
        overlaps: bool,
    ) -> None:
        """Allocate the state on the device. `overlaps` means that a step is launched while the previous one runs."""
        self.model = model
        self.draft = draft
        self.sizes = sizes
        self.controls = controls
        self.overlaps = overlaps
        self._options = options
        models = [model] if draft is None else [model, *draft.models]
        self._weights = Weights(models, controls, options.sleep_folder, options.checkpoint)
        self.device_state: DeviceState | None = self._allocate()

    @property
    def steps_in_flight(self) -> int:
        """Number of steps that may be launched before the first is collected, in a pipeline of ranks; otherwise 1."""
        return self.controls.steps_in_flight

    @property
    def asleep(self) -> bool:
        return self.device_state is None

    @property
    def replays(self) -> bool:
        """True if decode steps replay captured graphs."""
        return self.device_state is not None and self.device_state.runner.graphs is not None

    def awake(self) -> DeviceState:
        """Return the state on the device, which a replica that is awake has."""
        assert self.device_state is not None, "a replica that sleeps has nothing to run"
        return self.device_state

    def is_image_encoded(self, key: bytes) -> bool:
        """Return whether the features of the image with this key are on the device."""
        features = None if self.device_state is None else self.device_state.runner.features
        return features is not None and not features.lacks(key)

    def expert_cache_figures(self) -> dict[str, int]:
        """Return fields of `CoreLoad` about the caches of offloaded experts on all ranks; none without offloading."""
        own = self.model.expert_cache
        return self.controls.sum_figures({} if own is None else own.figures())

    def image_metrics(self) -> dict[str, float]:
        """Return fields of `LoadMetrics` about the vision encoder; none for a model without one, or while it sleeps."""
        features = None if self.device_state is None else self.device_state.runner.features
        return {} if features is None else features.metrics()

    def settle_weights(self, timeout_s: float) -> None:
        """Wait until the weights have the memory layout that is fastest to read, at most `timeout_s` per model."""
        self._weights.settle(timeout_s)

    def offload_weights(self, on_progress: Callable[[], None]) -> int:
        """Move the weights to host memory or to the folder, and return the bytes of the weights and of the KV cache.

        Raises OutOfMemory if there is too little room; the weights then stay where they are.
        """
        kv_bytes = self.sizes.num_blocks * self._weights.kv_bytes_per_block(self.sizes.block_size)
        return self._weights.offload_or_restore(on_progress) + kv_bytes

    def release_device_state(self) -> None:
        """Release the KV cache and the runner on all ranks. The caller holds no reference to them."""
        self.controls.send(Release())
        self.model.ranks.pipeline.finish_sends()
        self._options.kv_connector.serve(None)  # it references the cache too
        self.device_state = None
        if self.draft is not None:
            self.draft.release()
        free_cached_memory(self.model.device)

    def restore(self, on_progress: Callable[[], None]) -> None:
        """Reload the weights and allocate the state on the device; see `undo_restore`.

        Raises OutOfMemory or SleepFileError.
        """
        self._weights.reload_weights(on_progress)
        self.device_state = self._allocate()

    def undo_restore(self, on_progress: Callable[[], None]) -> None:
        """Release what a failed `restore` has allocated."""
        self.release_device_state()
        self._weights.offload_weights(on_progress)
        free_cached_memory(self.model.device)

    def _allocate(self) -> DeviceState:
        options = self._options
        device_state = DeviceState(
            self.model,
            self.sizes,
            self.controls,
            options.tenants,
            num_mask_words=options.num_mask_words,
            kv_connector=options.kv_connector,
            adapters=options.adapters.slots if options.adapters.is_open else None,
            cutting=options.cutting,
        )
        options.kv_connector.serve(device_state.kv)
        if self.draft is not None:
            self.draft.allocate(device_state.kv)
        return device_state

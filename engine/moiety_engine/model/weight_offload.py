"""Memory of a model's weights: their size, their pages, and their offload to host memory or a file (sleep mode).

Offloaded weights keep their tensor objects and lose only the memory: tensors and views of them are valid again after
the return, possibly at another address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

import structlog
import torch
from torch import Tensor

from moiety_engine.errors import CheckpointError, EngineError, OutOfMemory, SleepFileError
from moiety_engine.memory import Memory, available_bytes
from moiety_engine.model.spec import ModelSpec
from moiety_engine.model.weight_file import WeightFile, bytes_of
from moiety_engine.model.weights import ModelWeights, allocate
from moiety_kernels.cpu import pages

if TYPE_CHECKING:
    from moiety_engine.offload.cache import ExpertCache

log = structlog.get_logger()


def named_tensors(weights: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a dataclass of weights with its dotted field path; tensors that occur twice come twice."""
    if isinstance(weights, Tensor):
        yield name, weights
    elif isinstance(weights, tuple):
        for part in weights:
            yield from named_tensors(part, name)
    elif is_dataclass(weights):
        for field in fields(weights):
            inner = f"{name}.{field.name}" if name else field.name
            yield from named_tensors(getattr(weights, field.name), inner)


def storages_of(weights: ModelWeights) -> list[torch.UntypedStorage]:
    """Return the memory of the weights, each storage once, although tensors may share one."""
    storages = (tensor.untyped_storage() for _, tensor in named_tensors(weights))
    return list({storage._cdata: storage for storage in storages}.values())


def fill_weights(weights: ModelWeights, loaded: ModelWeights) -> None:
    """Fill weights whose memory was released with the content of `loaded`, which loses its memory.

    Raises CheckpointError if they are not of the same tensors.
    """
    pairs = list(zip(named_tensors(weights), named_tensors(loaded), strict=False))
    is_same = all(_place(own) == _place(other) for own, other in pairs)
    ours, theirs = storages_of(weights), storages_of(loaded)
    if not is_same or len(ours) != len(theirs) or len(pairs) != sum(1 for _ in named_tensors(weights)):
        raise CheckpointError("it has other tensors than those that were loaded at the start")
    for storage, filled in zip(ours, theirs, strict=True):  # one at a time: on a CPU both are the same memory
        storage.resize_(filled.nbytes())
        bytes_of(storage).copy_(bytes_of(filled))
        filled.resize_(0)


def _place(named: tuple[str, Tensor]) -> tuple[object, ...]:
    """Return a tensor's name, type and place in its storage."""
    name, tensor = named
    return name, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the memory of the model's weights, in bytes."""
    weights = allocate(spec, device=torch.device("meta"), dtype=dtype)
    distinct = {id(tensor): tensor for _, tensor in named_tensors(weights)}
    return sum(tensor.nbytes for tensor in distinct.values())


def require_fit(num_bytes: int, memory: Memory, device: torch.device) -> None:
    """Raise OutOfMemory unless weights of `num_bytes` leave some of the free memory."""
    if num_bytes < memory.free_bytes:
        return
    wanted, free, total = (f"{one / 2**30:.2f} GiB" for one in (num_bytes, memory.free_bytes, memory.total_bytes))
    if num_bytes > memory.total_bytes:
        advice = "choose a smaller or a quantised model, or use --dtype bfloat16"
    else:
        advice = "end other processes on the GPU (nvidia-smi lists them), or choose a smaller model"
        if device.type == "cpu":
            advice = "end other processes, raise the container's memory limit, or choose a smaller model"
    raise OutOfMemory(f"the weights need {wanted}, but the {device} has {free} free of {total}: {advice}")


class HostCopy:
    """Copy of weights in host memory."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def move(self, storages: list[torch.UntypedStorage], on_progress: Callable[[], None]) -> None:
        """Move the weights here, and release their memory."""
        for storage in storages:  # one at a time: on a CPU both are the same memory
            self._parts.append(bytes_of(storage).to("cpu", copy=True))
            storage.resize_(0)
            on_progress()

    def read(self, storages: list[torch.UntypedStorage], on_progress: Callable[[], None]) -> None:
        """Allocate the memory of the weights and fill it."""
        for storage, copy in zip(storages, self._parts, strict=True):
            storage.resize_(copy.nbytes)
            bytes_of(storage).copy_(copy)
            on_progress()

    def close(self) -> None:
        """Release the memory."""
        self._parts = []


class WeightOffload:
    """Mover of one model's weights between its device and host memory or a file. Used between steps only."""

    def __init__(self, weights: ModelWeights) -> None:
        self.weights, self._storages = weights, storages_of(weights)
        self._copy: HostCopy | WeightFile | None = None
        self._gathering = pages.collapse_into_large_pages(map(bytes_of, self._storages))

    def settle(self, timeout_s: float) -> None:
        """Wait until the weights are in large pages, for at most `timeout_s`."""
        if self._gathering is not None:
            self._gathering.join(timeout_s)

    @property
    def is_offloaded(self) -> bool:
        return self._copy is not None

    @torch.inference_mode()
    def offload_weights(self, on_progress: Callable[[], None], folder: str = "") -> int:
        """Move the weights to host memory, or to a file in the folder, and return the bytes released on the device.

        `on_progress` is called after each tensor, or each chunk of the file. Raises OutOfMemory, without moving
        anything, if the host has too little memory, or the folder too little space.
        """
        assert self._copy is None, "the weights are offloaded already"
        num_bytes = sum(storage.nbytes() for storage in self._storages)
        if not folder and num_bytes >= available_bytes():
            wanted, free = (f"{one / 2**30:.2f} GiB" for one in (num_bytes, available_bytes()))
            raise OutOfMemory(
                f"the weights need {wanted}, but {free} of the host's memory are free: they stay on the device"
            )
        copy = WeightFile(folder, num_bytes) if folder else HostCopy()
        copy.move(self._storages, on_progress)
        self._copy = copy
        return num_bytes

    @torch.inference_mode()
    def reload_weights(self, on_progress: Callable[[], None], load: Callable[[], ModelWeights]) -> None:
        """Move the weights back to the device. `load` loads them from the checkpoint, if the file cannot be read.

        Raises OutOfMemory if the device has too little memory, and SleepFileError if neither the file nor the
        checkpoint can be read. The weights are then where they were.
        """
        assert self._copy is not None, "the weights are on the device already"
        try:
            self._copy.read(self._storages, on_progress)
        except torch.OutOfMemoryError as exc:
            self._release()
            raise OutOfMemory(
                "the device has too little free memory for the weights: end other processes on it"
            ) from exc
        except OSError as exc:
            self._release()
            self._load_again(exc.strerror or str(exc), load)
        self._copy.close()
        self._copy = None
        self._gathering = pages.collapse_into_large_pages(map(bytes_of, self._storages))

    def _load_again(self, reason: str, load: Callable[[], ModelWeights]) -> None:
        """Fill the weights from the checkpoint. Raises SleepFileError."""
        try:
            fill_weights(self.weights, load())
        except (EngineError, OSError, RuntimeError) as exc:  # torch raises RuntimeError
            self._release()
            raise SleepFileError(
                f"the file of the sleeping engine's weights cannot be read: {reason}; and the checkpoint does not "
                f"replace it: {exc}. Restart the engine; check the disk of --sleep-folder"
            ) from exc
        log.warning(
            "sleep_file_unreadable",
            reason=reason,
            advice="the weights were loaded from the checkpoint instead; check the disk of --sleep-folder",
        )

    def _release(self) -> None:
        """Release the memory of weights that were not read completely."""
        for storage in self._storages:
            storage.resize_(0)


class OffloadableModel:
    """Base of models, or of parts of one, whose weights sleep mode moves away and back between steps."""

    _weight_offload: WeightOffload
    expert_cache: ExpertCache | None

    @property
    def weights(self) -> ModelWeights:
        """Weights of this rank; their memory is released while they are offloaded."""
        return self._weight_offload.weights

    @property
    def is_offloaded(self) -> bool:
        """Return whether `offload_weights` has moved the weights away."""
        return self._weight_offload.is_offloaded

    def offload_weights(self, on_progress: Callable[[], None], folder: str = "") -> int:
        """Move the weights to host memory, or to a file in the folder, and return the bytes released on the device.

        Raises OutOfMemory.
        """
        if self.expert_cache is not None:
            self.expert_cache.settle()
        return self._weight_offload.offload_weights(on_progress, folder)

    def reload_weights(self, on_progress: Callable[[], None], load: Callable[[], ModelWeights]) -> None:
        """Move the weights back to the device; see WeightOffload. Raises OutOfMemory or SleepFileError."""
        self._weight_offload.reload_weights(on_progress, load)

    def close(self) -> None:
        """Close files and threads of the expert cache; nothing may be computed afterwards."""
        if self.expert_cache is not None:
            self.expert_cache.close()

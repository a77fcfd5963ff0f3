"""Memory of a model's weights: their size, their pages, and their offload to host memory or a file (sleep mode).

Offloaded weights keep their tensor objects and lose only the memory: tensors and views of them are valid again after
the return, possibly at another address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moiety_engine.errors import OutOfMemory
from moiety_engine.memory import Memory, available_bytes
from moiety_engine.model.spec import ModelSpec
from moiety_engine.model.weight_file import WeightFile, bytes_of
from moiety_engine.model.weights import ModelWeights, allocate
from moiety_kernels.cpu import pages

if TYPE_CHECKING:
    from moiety_engine.offload.cache import ExpertCache


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
        storages = (tensor.untyped_storage() for _, tensor in named_tensors(weights))
        self._storages = list({storage._cdata: storage for storage in storages}.values())  # tensors may share one
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
    def reload_weights(self, on_progress: Callable[[], None]) -> None:
        """Move the weights back to the device.

        Raises OutOfMemory, and leaves the weights where they are, if the device has too little memory.
        """
        assert self._copy is not None, "the weights are on the device already"
        try:
            self._copy.read(self._storages, on_progress)
        except torch.OutOfMemoryError as exc:
            for storage in self._storages:
                storage.resize_(0)
            raise OutOfMemory(
                "the device has too little free memory for the weights: end other processes on it"
            ) from exc
        self._copy.close()
        self._copy = None
        self._gathering = pages.collapse_into_large_pages(map(bytes_of, self._storages))


class OffloadableModel:
    """Base of models, or of parts of one, whose weights sleep mode moves away and back between steps."""

    _weight_offload: WeightOffload
    expert_cache: ExpertCache | None

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

    def reload_weights(self, on_progress: Callable[[], None]) -> None:
        """Move the weights back to the device. Raises OutOfMemory."""
        self._weight_offload.reload_weights(on_progress)

    def close(self) -> None:
        """Close files and threads of the expert cache; nothing may be computed afterwards."""
        if self.expert_cache is not None:
            self.expert_cache.close()

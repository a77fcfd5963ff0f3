"""Where a model's weights are: how much memory they take, in what pages, and how they leave a device and come back.

What leaves keeps its tensors, only their memory goes: whoever holds one, or a view of one, has it again afterwards. But
it may come back to another address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from moiety_engine.errors import OutOfMemory
from moiety_engine.memory import Memory, available_bytes
from moiety_engine.model.spec import ModelSpec
from moiety_engine.model.weights import ModelWeights, allocate
from moiety_kernels.cpu import pages


def named_tensors(weights: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a dataclass of weights, by the names of the fields that lead to it; one that is there twice comes
    twice."""
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
    """Memory that the model's weights take."""
    weights = allocate(spec, device=torch.device("meta"), dtype=dtype)
    distinct = {id(tensor): tensor for _, tensor in named_tensors(weights)}
    return sum(tensor.nbytes for tensor in distinct.values())


def require_fit(num_bytes: int, memory: Memory, device: torch.device) -> None:
    """Raises OutOfMemory where weights of so many bytes leave nothing of what is free."""
    if num_bytes < memory.free_bytes:
        return
    wanted, free, total = (f"{one / 2**30:.2f} GiB" for one in (num_bytes, memory.free_bytes, memory.total_bytes))
    if num_bytes > memory.total_bytes:
        advice = "choose a smaller or a quantised model, or --dtype bfloat16 if it is not that already"
    else:
        advice = "end what else uses it (nvidia-smi shows what), or choose a smaller model"
        if device.type == "cpu":
            advice = "end what else uses it, raise the container's limit, or choose a smaller model"
    raise OutOfMemory(f"the weights take {wanted}, and of the {device}'s {total} there are {free} free: {advice}")


class WeightOffload:
    """Moves one model's weights between its device and host memory. Used between steps only."""

    def __init__(self, weights: ModelWeights) -> None:
        storages = (tensor.untyped_storage() for _, tensor in named_tensors(weights))
        self._storages = list({storage._cdata: storage for storage in storages}.values())  # tensors may share one
        self._away: list[Tensor] | None = None
        self._gathering = pages.enlarge(map(_bytes_of, self._storages))

    def settle(self, timeout_s: float) -> None:
        """Wait until the weights lie as they are read fastest, or as long as that."""
        if self._gathering is not None:
            self._gathering.join(timeout_s)

    @property
    def away(self) -> bool:
        return self._away is not None

    @torch.inference_mode()
    def leave(self, on_progress: Callable[[], None]) -> int:
        """To host memory; `on_progress` is called after each tensor. Returns how many bytes are free on the device
        thereby. Raises OutOfMemory where the host has no room for them; then nothing has moved."""
        assert self._away is None, "the weights have left already"
        num_bytes = sum(storage.nbytes() for storage in self._storages)
        if num_bytes >= available_bytes():
            wanted, free = (f"{one / 2**30:.2f} GiB" for one in (num_bytes, available_bytes()))
            raise OutOfMemory(f"the weights take {wanted}, and of the host's memory {free} are free: they stay")
        self._away = []
        for storage in self._storages:  # one at a time: on a CPU both are the same memory
            self._away.append(_bytes_of(storage).to("cpu", copy=True))
            storage.resize_(0)
            on_progress()
        return num_bytes

    @torch.inference_mode()
    def come_back(self, on_progress: Callable[[], None]) -> None:
        """To the device. Raises OutOfMemory where it has no room any more; then they are still away."""
        assert self._away is not None, "the weights are there"
        try:
            for storage, copy in zip(self._storages, self._away, strict=True):
                storage.resize_(copy.nbytes)
                _bytes_of(storage).copy_(copy)
                on_progress()
        except torch.OutOfMemoryError as exc:
            for storage in self._storages:
                storage.resize_(0)
            raise OutOfMemory("the device has no room for the weights any more: end what else uses it") from exc
        self._away = None
        self._gathering = pages.enlarge(map(_bytes_of, self._storages))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""Input checks shared by the operations: one error type, and messages with the argument's name and required form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Shaped(Protocol):
    """A tensor, or an object with a tensor's shape."""

    @property
    def shape(self) -> Sequence[int]: ...


class KernelInputError(ValueError):
    """A tensor passed to an operation has a shape, dtype or layout that the operation does not support."""


class Strided(Shaped, Protocol):
    """A tensor, or an object with a tensor's shape and strides."""

    def stride(self) -> tuple[int, ...]: ...


def has_contiguous_blocks(cache_NGPd: Strided) -> bool:
    """Return whether each block of a KV cache is contiguous; blocks may be apart. Calls no function of torch."""
    _, _, places, width = cache_NGPd.shape
    return cache_NGPd.stride()[1:] == (places * width, width, 1)


def require(condition: bool, message: str) -> None:
    """Raise KernelInputError with `message` unless `condition`. Build no f-string for the message on a hot path."""
    if not condition:
        raise KernelInputError(message)


def require_shape(name: str, tensor: Shaped, shape: tuple[int, ...]) -> None:
    """Raise unless the tensor has exactly this shape; -1 matches any extent."""
    actual = tensor.shape
    if actual == shape:
        return
    agrees = len(actual) == len(shape)
    if agrees:
        for got, want in zip(actual, shape, strict=True):
            if want not in (got, -1):
                agrees = False
    if not agrees:
        raise KernelInputError(f"{name} has shape {tuple(actual)}, expected {shape} (-1: any)")

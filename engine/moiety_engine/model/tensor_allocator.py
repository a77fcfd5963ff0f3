"""Interface of the allocator of a model's weights, by which layers allocate their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class TensorAllocator(Protocol):
    """Allocator of large products, of other matrices, and of float32 tensors."""

    def product(self, *shape: int) -> Tensor: ...

    def matrix(self, *shape: int) -> Tensor: ...

    def vector(self, *shape: int) -> Tensor: ...

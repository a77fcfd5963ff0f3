"""Experts in page-locked memory of the host, from which a device copies by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class PinnedExperts:
    """`tensors`: of each mixture layer those that its experts are made of, by their names; empty until it is
    finished."""

    is_whole = False  # memory is filled anew at each start

    def __init__(self) -> None:
        self.tensors: list[dict[str, Tensor]] = []
        self._own: set[int] = set()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Raises OutOfMemory."""
        try:
            tensor = torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as exc:
            raise OutOfMemory(
                f"the host has no room for {torch.Size(shape).numel() * dtype.itemsize / 2**30:.2f} GiB more of "
                f"page-locked memory, where offloaded experts are kept ({exc}): raise its limit, or choose a smaller "
                "or a quantised model"
            ) from exc
        self._own.add(tensor.data_ptr())
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether it came from `empty`."""
        return tensor.data_ptr() in self._own

    def finish(self, layers: Sequence[Mapping[str, Tensor]]) -> None:
        """The tensors, which came from `empty`, have been filled."""
        self.tensors = [dict(layer) for layer in layers]

    def close(self) -> None:
        self.tensors.clear()

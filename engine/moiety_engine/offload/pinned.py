"""Expert store in page-locked host memory, from which the device copies asynchronously."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class PinnedExperts:
    """Expert store in page-locked host memory.

    `tensors`: the expert tensors of each MoE layer by name; empty until the store is finished.
    """

    is_whole = False  # memory is filled again at each start

    def __init__(self) -> None:
        self.tensors: list[dict[str, Tensor]] = []
        self._own: set[int] = set()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a page-locked tensor. Raises OutOfMemory."""
        try:
            tensor = torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as exc:
            raise OutOfMemory(
                f"the host cannot allocate {torch.Size(shape).numel() * dtype.itemsize / 2**30:.2f} GiB "
                f"more of page-locked memory for offloaded experts ({exc}): raise its limit, or choose a "
                "smaller or a quantised model"
            ) from exc
        self._own.add(tensor.data_ptr())
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `empty` returned this tensor."""
        return tensor.data_ptr() in self._own

    def finish(self, layers: Sequence[Mapping[str, Tensor]]) -> None:
        """Finish the store; the tensors must come from `empty` and be filled."""
        self.tensors = [dict(layer) for layer in layers]

    def close(self) -> None:
        self.tensors.clear()

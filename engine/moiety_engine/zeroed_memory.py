"""Zeros instead of uninitialized memory, for code whose kernels are compiled but not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ZEROED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


class ZeroedMemory(TorchFunctionMode):
    """Context in which new tensors of this thread are zero, as the results of kernels that do not run."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _ZEROED.get(func, func)(*args, **(kwargs or {}))

"""Products in float8 that keep the very numbers and scales that a checkpoint has: each beside the wide weight that it
stands for, filled through the same places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.names import placements
from moiety_engine.model.names.place import Place
from moiety_engine.model.weights import allocate, products_of
from moiety_kernels.quantization import QuantizedWeight

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.names.place import Shares
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.weights import ModelWeights
    from moiety_kernels.quantization import WeightFormat


_STACKED = 3  # dimensions of a tensor that holds all experts


class AsStored:
    """Owns the numbers and scales of `weights`' products until each is handed out whole. Memory is taken only by what
    is filled."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, form: WeightFormat, names: set[str]) -> None:
        on_cpu = torch.device("cpu")
        values = allocate(spec, device=on_cpu, dtype=torch.float32, product_dtype=torch.uint8)
        scales = allocate(spec, device=on_cpu, dtype=torch.float32, groups=form.num_groups)
        self._form = form
        self._values, self._scales = placements(spec, values, names), placements(spec, scales, names)
        three = zip(products_of(weights), products_of(values), products_of(scales), strict=True)
        self._of_product = {id(wide): parts for wide, *parts in three}

    def takes(self, name: str) -> bool:
        """Whether the scales of that tensor go where its rows go, and of gate and up, where it stacks them, each begins
        with a block of its own."""
        values, scales = self._values[name], self._scales[name]
        rows_alike = scales.shape == (*values.shape[:-1], self._form.num_groups(values.shape[-1]))
        stacked = len(values.shape) == _STACKED
        return isinstance(values, Place) and rows_alike and not (stacked and values.shape[1] // 2 % self._form.rows)

    def places(self, name: str) -> tuple[Place | Shares, Place | Shares]:
        """Where a tensor's bytes go, and the scales of its rows."""
        return self._values[name], self._scales[name]

    def hand_out(self, wide: Tensor, device: torch.device) -> QuantizedWeight:
        """The product that stands for `wide`, on the device."""
        parts = self._of_product.pop(id(wide))
        values, scales = (part.to(device) for part in parts)
        if device.type != "cpu":
            for part in parts:
                part.untyped_storage().resize_(0)
        return QuantizedWeight(values.view(torch.float8_e4m3fn), scales, self._form)

"""Products that keep a checkpoint's quantized values and scales unchanged.

They are filled through the same tensor mappings as the unquantized weights that they replace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.input_orders import InputOrders
from moiety_engine.model.tensor_shards import places_on_rank
from moiety_engine.model.weights import allocate, products_of
from moiety_kernels.quantization import QuantizedWeight
from moiety_kernels.quantization.reference import pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.model.names.tensor_mapping import Shares, TensorMapping
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.weights import ModelWeights
    from moiety_kernels.quantization import WeightFormat


_STACKED = 3  # dimensions of a tensor that holds all experts


class StoredPrecision:
    """Owner of the quantized values and scales of `weights`' products until each is handed out.

    Only filled tensors use memory. `weights` belong to the rank's `own` spec, a part of the whole `spec`. Where the
    checkpoint's groups are larger than those of `form`, scales are repeated. `groups_of`: the group of each input of
    tensors that are quantized on disk, by name; None if groups are in order.
    """

    def __init__(
        self,
        spec: ModelSpec,
        own: ModelSpec,
        rank_position: RankPosition,
        weights: ModelWeights,
        form: WeightFormat,
        names: set[str],
        groups_of: Mapping[str, Tensor | None],
    ) -> None:
        on_cpu, stored = torch.device("cpu"), spec.weight_format
        assert stored is not None, "the checkpoint is not quantized"
        values = allocate(own, device=on_cpu, dtype=torch.float32, product_dtype=torch.uint8)
        scales = allocate(own, device=on_cpu, dtype=torch.float32, groups=stored.num_scales)
        self._form, self._stored = form, stored
        self._values = places_on_rank(spec, own, values, rank_position, names)
        self._scales = places_on_rank(spec, own, scales, rank_position, names, stored.num_scales)
        three = zip(products_of(weights), products_of(values), products_of(scales), strict=True)
        self._of_product = {id(wide): parts for wide, *parts in three}
        self._orders: InputOrders | None = None
        if stored.ordered and stored.group is not None:
            self._orders = InputOrders(products_of(values), self._values, groups_of, stored.group)

    def obstacle(self, name: str) -> str | None:
        """Return why a tensor cannot be kept as stored; None if it can.

        Its scales must be arranged like its rows, and in stacked gate and up matrices each half must start with a new
        block. Matrices that are joined must have their inputs in one order.
        """
        if self._orders is not None and name in self._orders.unequal:
            return "matrices that are multiplied together store their inputs in different orders"
        values, scales = self._values[name], self._scales[name]
        rows_alike = scales.shape == (*values.shape[:-1], self._stored.num_scales(values.shape[-1]))
        stacked = len(values.shape) == _STACKED
        whole = rows_alike and not (stacked and values.shape[1] // 2 % self._form.rows)
        return None if whole else "rows and blocks lie across"

    def places(self, name: str) -> tuple[TensorMapping | Shares, TensorMapping | Shares]:
        """Return the mappings of a tensor's bytes and of its rows' scales."""
        return self._values[name], self._scales[name]

    def hand_out(self, wide: Tensor, device: torch.device) -> QuantizedWeight:
        """Return the quantized product that replaces `wide`, on the device; it can be taken once."""
        values, scales = self._of_product.pop(id(wide))
        width = values.shape[-1]
        times = self._form.num_scales(width) // self._stored.num_scales(width)
        spread = scales if times == 1 else scales.repeat_interleave(times, -1)
        order = None if self._orders is None else self._orders.pop(values)
        order = None if order is None else order.to(device)
        kept = QuantizedWeight(self._numbers(values).to(device), spread.to(device), self._form, order)
        for part, moved in ((values, kept.values_NK), (scales, kept.scales_NG)):
            if moved.untyped_storage().data_ptr() != part.untyped_storage().data_ptr():
                part.untyped_storage().resize_(0)  # releases the memory although mappings still have views
        return kept

    def _numbers(self, values: Tensor) -> Tensor:
        """Return the values in the kernels' layout; integers are stored on disk plus half their range."""
        if self._form.is_float8:
            return values.view(torch.float8_e4m3fn)
        if self._form.bits == 8:
            return values.bitwise_xor_(self._form.half).view(torch.int8)
        numbers = values.view(torch.int8)
        return pack(numbers if self._form.floating else numbers - self._form.half, self._form)

"""Products that keep a checkpoint's quantized values and scales unchanged.

They are filled through the same tensor mappings as the unquantized weights that they replace.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.divided_groups import divides_inputs, shard_of_inputs
from moiety_engine.model.input_orders import InputOrders
from moiety_engine.model.names.tensor_mapping import TensorMapping
from moiety_engine.model.tensor_shards import own_range, places_on_rank, whole_places
from moiety_engine.model.weights import allocate, products_of
from moiety_kernels.quantization import QuantizedWeight
from moiety_kernels.quantization.reference import pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from moiety_engine.distribution.layout import RankPosition
    from moiety_engine.model.divided_groups import InputShard
    from moiety_engine.model.names.tensor_mapping import Shares
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
        self._shards: dict[int, InputShard] = {}  # by id of the wide product
        self._obstacles: dict[str, str] = {}  # to dividing the inputs of a tensor
        if stored.ordered and stored.group is not None:
            divided = [name for name in groups_of if divides_inputs(self._values[name])]
            wholes = whole_places(spec, names) if divided else {}
            for name in divided:
                self._divide(name, wholes[name], groups_of[name], stored.group, rank_position)
            rest = {name: groups for name, groups in groups_of.items() if name not in divided}
            self._orders = InputOrders(products_of(values), self._values, rest, stored.group)

    def _divide(
        self, name: str, whole: TensorMapping | Shares, groups: Tensor | None, group: int, rank_position: RankPosition
    ) -> None:
        """Store the rank's inputs of the tensor as a shard of its own groups."""
        place = self._values[name]
        assert isinstance(place, TensorMapping)
        address, (num_rows, width) = place.view.untyped_storage().data_ptr(), place.shape
        of = [key for key, (values, _) in self._of_product.items() if values.untyped_storage().data_ptr() == address]
        plain = isinstance(whole, TensorMapping) and whole.arrange is None
        if len(of) != 1 or not plain or place.view.shape != self._of_product[of[0]][0].shape:
            self._obstacles[name] = "ranks divide the inputs of rearranged matrices"
            return
        inputs = own_range(width, place.view.shape[1], rank_position)
        shard = shard_of_inputs(torch.arange(width) // group if groups is None else groups, inputs, self._form.pack)
        if not shard.saves_memory(place.view.shape[1], self._stored):
            self._obstacles[name] = "each rank has too few inputs of each group"
            return
        rows = place.view.shape[0]
        values = torch.empty(rows, shard.width, dtype=torch.uint8)
        scales = torch.empty(rows, shard.format_of(self._stored).num_scales(shard.width))
        self._shards[of[0]], self._of_product[of[0]] = shard, [values, scales]
        self._values[name] = TensorMapping(values, (num_rows, width), partial(shard.values, absent=self._form.half))
        per_row = self._stored.num_scales(width)
        self._scales[name] = TensorMapping(scales, (num_rows, per_row), partial(shard.scales, form=self._stored))

    def is_divided(self, wide: Tensor) -> bool:
        """Return whether a product is stored as a shard with groups of its own, whatever its width."""
        return id(wide) in self._shards

    def obstacle(self, name: str) -> str | None:
        """Return why a tensor cannot be kept as stored; None if it can.

        Its scales must be arranged like its rows, and in stacked gate and up matrices each half must start with a new
        block. Matrices that are joined must have their inputs in one order.
        """
        if name in self._obstacles:
            return self._obstacles[name]
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
        shard = self._shards.get(id(wide))
        if shard is not None:
            form = shard.format_of(self._form)
            return QuantizedWeight(self._numbers(values).to(device), scales.to(device), form, shard.order_K.to(device))
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

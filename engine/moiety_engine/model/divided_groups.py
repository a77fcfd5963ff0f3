"""Shards of quantized products whose inputs are divided among ranks and stored by group (GPTQ's act-order).

A rank has inputs of many groups, and of each group another number. Its shard stores them by group in blocks of 32, each
with the scales of its group. The last block of a group is filled up with inputs that do not exist and count as zero.

N outputs, K inputs, B blocks of inputs, G groups, s numbers of a group's scale (its scale, and its offset if any).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.names.tensor_mapping import TensorMapping
from moiety_kernels.quantization.weight import BLOCK

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.quantization import WeightFormat


@dataclass(frozen=True, slots=True)
class InputShard:
    """A rank's inputs of a product.

    `place_K`: the place of each stored input among all inputs sorted by group, -1 where none exists; `order_K`: its
    index among the rank's inputs, int32, or -1; `group_B`: the group of each block.
    """

    place_K: Tensor
    order_K: Tensor
    group_B: Tensor

    @property
    def width(self) -> int:
        """Number of stored inputs."""
        return len(self.place_K)

    def saves_memory(self, num_inputs: int, form: WeightFormat) -> bool:
        """Return whether a row takes less memory than `num_inputs` bfloat16, the inputs of the rank."""
        num_bytes = self.width * form.bits // 8 + 4 * self.format_of(form).num_scales(self.width)
        return num_bytes < 2 * num_inputs

    def values(self, whole_NK: Tensor, absent: int) -> Tensor:
        """Return the numbers of the shard of a tensor with all inputs by group; `absent`: that of missing inputs."""
        own_NK = whole_NK.index_select(1, self.place_K.clamp(min=0))
        own_NK[:, self.place_K < 0] = absent
        return own_NK

    def scales(self, whole_NG: Tensor, form: WeightFormat) -> Tensor:
        """Return the scales of each block, [N, B · s], of those of each group, [N, G · s]."""
        numbers = 2 if form.offsets else 1
        return whole_NG.view(len(whole_NG), -1, numbers).index_select(1, self.group_B).flatten(1)

    def format_of(self, form: WeightFormat) -> WeightFormat:
        """Return the format of the shard, of a product in `form`."""
        return replace(form, group=BLOCK)


def shard_of_inputs(group_of_K: Tensor, inputs: slice, pack: int) -> InputShard:
    """Return the shard with `inputs`, of a product whose inputs belong to these groups.

    `pack`: inputs that the kernels need together.
    """
    by_group_K = group_of_K.long().sort(stable=True).indices
    place_of_K = torch.empty_like(by_group_K)
    place_of_K[by_group_K] = torch.arange(len(by_group_K))
    own = by_group_K[(by_group_K >= inputs.start) & (by_group_K < inputs.stop)]
    groups, index, counts = torch.unique_consecutive(group_of_K[own].long(), return_inverse=True, return_counts=True)
    num_blocks = -(-counts // BLOCK)
    first_block, first = num_blocks.cumsum(0) - num_blocks, counts.cumsum(0) - counts
    stored_at = BLOCK * first_block[index] + torch.arange(len(own)) - first[index]
    width = -(-BLOCK * int(num_blocks.sum()) // pack) * pack
    place_K, order_K = torch.full((width,), -1), torch.full((width,), -1, dtype=torch.int32)
    place_K[stored_at], order_K[stored_at] = place_of_K[own], (own - inputs.start).int()
    group_B = groups.repeat_interleave(num_blocks)
    group_B = torch.cat((group_B, group_B[-1:].expand(width // BLOCK - len(group_B))))
    return InputShard(place_K, order_K, group_B)


def divides_inputs(place: object) -> bool:
    """Return whether the mapping takes a part of the inputs of a product's tensor."""
    return isinstance(place, TensorMapping) and place.view.dim() == 2 and place.view.shape[1] != place.shape[1]

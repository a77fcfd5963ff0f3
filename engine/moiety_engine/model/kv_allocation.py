"""Allocation of one rank's KV cache: the places of its layers in a block, and their bytes.

N blocks, G key-value heads, P positions per block, d head width, L width of a latent row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.batch import KvCache, LatentCache, LayerCache
from moiety_engine.model.spec import KV_SCALE_BYTES, LatentAttentionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moiety_engine.model.cache_groups import CacheGroup
    from moiety_engine.model.spec import AttentionSpec, LayerSpec


class KvAllocation:
    """Layout of a rank's KV cache. A block has as many places as the largest cache group has layers here."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        first_layer: int,
        groups: Sequence[CacheGroup],
        dtype: torch.dtype,
        hidden: tuple[int, torch.dtype] | None,
    ) -> None:
        """Create the layout.

        `layers`: the rank's share of the layers from `first_layer` on. `groups`: cache groups of the whole model.
        `hidden`: width and dtype of hidden states, if the cache keeps them.
        """
        self._dtype, self._hidden = dtype, hidden
        group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        self._group_of_layer = tuple(group_of[first_layer + index] for index in range(len(layers)))
        self._num_groups = len(groups)
        self._places: list[AttentionSpec | LatentAttentionSpec] = []  # a layer of each place
        self._place_of_layer: list[int] = []
        taken = [0] * len(groups)
        for layer, group in zip(layers, self._group_of_layer, strict=True):
            place = taken[group]
            taken[group] += 1
            if place == len(self._places):
                self._places.append(layer.attention)
            self._place_of_layer.append(place)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of `block_size` tokens."""
        num_bytes = sum(one.cached_values for one in self._places) * self._dtype.itemsize
        if self._dtype is torch.int8:
            num_bytes += sum(one.cached_rows for one in self._places) * KV_SCALE_BYTES
        if self._hidden is not None:
            num_bytes += self._hidden[0] * self._hidden[1].itemsize
        return num_bytes * block_size

    def allocate(self, num_blocks: int, block_size: int, device: torch.device, rotation: str) -> KvCache:
        """Return a new cache with undefined content; `rotation`: digest of the rotary embedding."""

        def place(one: AttentionSpec | LatentAttentionSpec) -> LayerCache | LatentCache:
            if isinstance(one, LatentAttentionSpec):
                rows = empty(num_blocks, block_size, one.cached_values)
                if self._dtype is not torch.int8:
                    return LatentCache(rows, one.latent_width)
                of_parts = empty(2, num_blocks, block_size, dtype=torch.float32)
                return LatentCache(rows, one.latent_width, of_parts[0], of_parts[1])
            both = empty(2, num_blocks, one.num_kv_heads, block_size, one.head_dim)
            if self._dtype is not torch.int8:
                return LayerCache(both[0], both[1])
            scales = empty(2, num_blocks, one.num_kv_heads, block_size, dtype=torch.float32)
            return LayerCache(both[0], both[1], scales[0], scales[1])

        empty = partial(torch.empty, dtype=self._dtype, device=device)
        hidden: LatentCache | None = None
        if self._hidden is not None:
            width, dtype = self._hidden
            hidden = LatentCache(empty(num_blocks, block_size, width, dtype=dtype), width)
        places = [place(one) for one in self._places]
        layers = tuple(places[index] for index in self._place_of_layer)
        return KvCache(layers, num_blocks, block_size, rotation, hidden, self._num_groups, self._group_of_layer)

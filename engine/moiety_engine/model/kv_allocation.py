"""Allocation of one rank's cache: the places of its layers in a block, the states of recurrent layers, and their bytes.

N blocks, G key-value heads, P positions per block, d head width, L width of a latent row, I width of an index key.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from moiety_engine.distribution.layout import RankPosition
from moiety_engine.model.batch import Cache, CompressedCache, KvCache, RecurrentStateCache
from moiety_engine.model.paged_state_spec import PagedStateSpec
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.spec import KV_SCALE_BYTES, LatentAttentionSpec, kv_layer_of
from moiety_engine.model.tensor_shards import own_spec
from moiety_kernels.kv_store.caches import LatentCache, LayerCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.distribution.layout import Layout
    from moiety_engine.model.cache_groups import CacheGroup
    from moiety_engine.model.recurrent_specs import StatePart
    from moiety_engine.model.spec import AttentionSpec, LayerSpec, ModelSpec


class KvAllocation:
    """Layout of a rank's KV cache. A block has as many places as the largest cache group has layers here.

    If layers of different groups have caches of different shapes, a block is one row of values instead, in which the
    layers of each group lie one after the other from its beginning. A row is as long as the longest group needs.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        first_layer: int,
        groups: Sequence[CacheGroup],
        dtype: torch.dtype,
        activation_dtype: torch.dtype,
        hidden_width: int | None,
        *,
        num_shards: int = 1,
    ) -> None:
        """Create the layout.

        `layers`: the rank's share of the layers from `first_layer` on. `groups`: cache groups of the whole model.
        `hidden_width`: width of hidden states, in `activation_dtype`, if the cache keeps them. `num_shards`: ranks that
        divide the positions of a block. Each has the hidden states of all of them.
        """
        self._num_shards = num_shards
        self._dtype, self._activation_dtype, self._hidden_width = dtype, activation_dtype, hidden_width
        group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        self._sources = [kv_layer_of(layer.attention) for layer in layers]
        self._first_layer = first_layer
        stored_by = [first_layer + i if source is None else source for i, source in enumerate(self._sources)]
        self._group_of_layer = tuple(group_of.get(layer, 0) for layer in stored_by)
        self._num_groups = len(groups)
        self._places: list[AttentionSpec | LatentAttentionSpec] = []  # a layer of each place
        self._place_of_layer: list[int | RecurrentSpec] = []
        taken = [0] * len(groups)
        for layer, group in zip(layers, self._group_of_layer, strict=True):
            if isinstance(layer.attention, RecurrentSpec):
                self._place_of_layer.append(layer.attention)
                continue
            source = kv_layer_of(layer.attention)
            if source is not None:
                self._place_of_layer.append(self._place_of_layer[source - first_layer])
                continue
            place = taken[group]
            taken[group] += 1
            if place == len(self._places):
                self._places.append(layer.attention)
            self._place_of_layer.append(place)
        attentions = [layer.attention for layer in layers]
        self._paged = [None if isinstance(one, RecurrentSpec) else one for one in attentions]
        rows = [0] * len(groups)  # values of a token in all layers of a group
        for one, group in zip(self._paged, self._group_of_layer, strict=True):
            rows[group] += 0 if one is None else one.cached_values
        shapes = {one.cache_shape for one in self._paged if one is not None}
        self._shared_values = max(rows) if len(shapes) > 1 and len(groups) > 1 else None
        assert self._shared_values is None or dtype is not torch.int8, "scales are in no shared row"

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of `block_size` tokens."""
        values = sum(one.cached_values for one in self._places) if self._shared_values is None else self._shared_values
        num_bytes = values * self._dtype.itemsize
        index_widths = (one.index_key_width for one in self._places if isinstance(one, LatentAttentionSpec))
        num_bytes += sum(index_widths) * self._index_dtype.itemsize
        if self._dtype is torch.int8:
            num_bytes += sum(one.cached_rows for one in self._places) * KV_SCALE_BYTES
        num_bytes = num_bytes * block_size // self._num_shards
        if self._hidden_width is not None:
            num_bytes += self._hidden_width * self._activation_dtype.itemsize * block_size
        compressed = (one for one in self._place_of_layer if isinstance(one, PagedStateSpec))
        entries = sum(one.block_values(block_size) for one in compressed)
        return num_bytes + entries * self._dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in all recurrent layers."""
        parts = [part for one in self._place_of_layer if isinstance(one, RecurrentSpec) for part in one.state_parts]
        return sum(math.prod(part.shape) * self._state_dtype(part).itemsize for part in parts)

    @property
    def record_bytes(self) -> int:
        """Bytes of the recorded inputs of one token in all recurrent layers."""
        widths = [sum(one.input_widths) for one in self._place_of_layer if isinstance(one, RecurrentSpec)]
        return sum(widths) * self._activation_dtype.itemsize

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        num_state_slots: int,
        num_record_tokens: int,
        device: torch.device,
        rotation: str,
    ) -> KvCache:
        """Return a new cache with undefined content; `rotation`: digest of the rotary embedding."""
        own_size = block_size // self._num_shards

        def place(one: AttentionSpec | LatentAttentionSpec) -> LayerCache | LatentCache:
            if isinstance(one, LatentAttentionSpec):
                rows = empty(num_blocks, own_size, one.cached_values)
                index_keys: Tensor | None = None
                if one.index_key_width:
                    index_keys = empty(num_blocks, own_size, one.index_key_width, dtype=self._index_dtype)
                if self._dtype is not torch.int8:
                    return LatentCache(rows, one.latent_width, index_keys_NPI=index_keys)
                of_parts = empty(2, num_blocks, own_size, dtype=torch.float32)
                return LatentCache(rows, one.latent_width, of_parts[0], of_parts[1], index_keys)
            block = num_blocks, one.num_kv_heads, own_size
            both = empty(*block, one.head_dim), empty(*block, one.value_width)
            if self._dtype is not torch.int8:
                return LayerCache(*both)
            scales = empty(2, num_blocks, one.num_kv_heads, own_size, dtype=torch.float32)
            return LayerCache(*both, scales[0], scales[1])

        empty = partial(torch.empty, dtype=self._dtype, device=device)
        hidden: LatentCache | None = None
        if self._hidden_width is not None:
            rows = empty(num_blocks, block_size, self._hidden_width, dtype=self._activation_dtype)
            hidden = LatentCache(rows, self._hidden_width)
        shared: LatentCache | None = None
        if self._shared_values is not None:
            width = self._shared_values * own_size
            shared = LatentCache(empty(num_blocks, 1, width), width)
            paged = self._in_rows(shared.rows_NPL[:, 0], own_size)
        else:
            places = [place(one) for one in self._places]
            paged = [None if isinstance(one, RecurrentSpec) else places[one] for one in self._place_of_layer]

        def layer(one: int | RecurrentSpec, of_layer: Cache | None) -> Cache:
            if not isinstance(one, RecurrentSpec):
                assert of_layer is not None
                return of_layer
            widths = one.input_widths if num_record_tokens else ()
            record = partial(empty, num_state_slots, num_record_tokens, dtype=self._activation_dtype)
            state = RecurrentStateCache(
                tuple(empty(num_state_slots, *part.shape, dtype=self._state_dtype(part)) for part in one.state_parts),
                tuple(map(record, widths)),
                one.state_parts,
            )
            if not isinstance(one, PagedStateSpec) or not one.entry_widths:
                return state
            places = num_blocks, one.entries_of(block_size)
            entries, *index_keys = (empty(*places, width) for width in one.entry_widths)
            entry = one.tokens_per_entry, one.heads_in_entries
            return CompressedCache(entries, index_keys[0] if index_keys else None, block_size, state, *entry)

        return KvCache(
            tuple(map(layer, self._place_of_layer, paged)),
            num_blocks,
            block_size,
            rotation,
            hidden,
            self._num_groups,
            self._group_of_layer,
            num_state_slots,
            num_record_tokens,
            shared=shared,
        )

    def _in_rows(self, rows_NE: Tensor, own_size: int) -> list[LayerCache | LatentCache | None]:
        """Return the layers' views of rows that have a block each, with `own_size` positions."""
        found: list[LayerCache | LatentCache | None] = []
        ends = [0] * self._num_groups
        for one, group, source in zip(self._paged, self._group_of_layer, self._sources, strict=True):
            assert one is None or not isinstance(one, LatentAttentionSpec), "latent rows share no memory"
            if one is None or source is not None:
                found.append(None if source is None else found[source - self._first_layer])
                continue
            parts = []
            for width in (one.head_dim, one.value_width):
                begin, ends[group] = ends[group], ends[group] + one.num_kv_heads * own_size * width
                shape = one.num_kv_heads, own_size, width
                parts.append(rows_NE[:, begin : ends[group]].view(-1, *shape))
            found.append(LayerCache(*parts))
        return found

    @property
    def _index_dtype(self) -> torch.dtype:
        """Type of index keys: that of the cache, but never 8 bits, since rounding changes which tokens are selected."""
        return self._activation_dtype if self._dtype.itemsize == 1 else self._dtype

    def _state_dtype(self, part: StatePart) -> torch.dtype:
        return torch.float32 if part.exact else self._activation_dtype


class LargestAllocation:
    """Bytes of the cache on the rank that needs most of them: stages of a pipeline have layers of different kinds."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        groups: Sequence[CacheGroup],
        dtype: torch.dtype,
        activation_dtype: torch.dtype,
        hidden_width: int | None,
    ) -> None:
        """Create the layouts of all stages; see KvAllocation. `spec`: that of the whole model."""
        rank_positions = [RankPosition(layout, stage * layout.stage_size) for stage in range(layout.pp)]
        form = groups, dtype, activation_dtype, hidden_width
        self._stages = [
            KvAllocation(
                own_spec(spec, rank_position).layers,
                rank_position.layers_of(len(spec.layers)).start,
                *form,
                num_shards=layout.dcp,
            )
            for rank_position in rank_positions
        ]

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block of `block_size` tokens."""
        return max(stage.block_bytes(block_size) for stage in self._stages)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in all recurrent layers of a rank."""
        return max(stage.state_bytes for stage in self._stages)

    @property
    def record_bytes(self) -> int:
        """Bytes of the recorded inputs of one token in all recurrent layers of a rank."""
        return max(stage.record_bytes for stage in self._stages)

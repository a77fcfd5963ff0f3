"""Layout-independent access to the cache's content, token by token.

KV is read on one engine and written on another, whose blocks may have another size and data type. A rank reads and
writes shards of its cache: key-value heads, shares of states, or whole layers. Compressed entries, each of several
tokens, are rows that belong to the last of their tokens.

n blocks, P token slots a block, T tokens, G key-value heads, d head width, L width of a latent row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moiety_engine.kv_transfer.messages import Begin, CacheShard, Form, TensorLayout
from moiety_engine.model.batch import CompressedCache, KvCache, RecurrentStateCache
from moiety_kernels.kv_store import kv_store
from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_kernels.latent_input.reference import scale_of, to_whole

if TYPE_CHECKING:
    from moiety_engine.kv_transfer.cache_shards import CacheShare
    from moiety_engine.model.recurrent_specs import StatePart

_DTYPES = {  # of values that a cache can store
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_NUM_SCALED_PARTS = 4  # keys, values, and one scale per key and per value
_NUM_LATENT_SCALES = 2  # one for each of a row's two parts


@dataclass(frozen=True, slots=True)
class EntryCache:
    """Compressed entries of a layer: `parts` [N, places of a block, width], of `tokens` tokens each.

    An entry is in the block of `block_size` tokens that has its last token.
    """

    parts: tuple[Tensor, ...]
    tokens: int
    block_size: int

    def read(self, blocks_n: Tensor, positions_E: Tensor) -> list[Tensor]:
        """Return a copy of the entries at these positions, counted from the start of the first block."""
        block_E = blocks_n[positions_E // self.block_size]
        return [part[block_E, positions_E % self.block_size // self.tokens] for part in self.parts]

    def write(self, rows: Sequence[Tensor], blocks_n: Tensor, positions_E: Tensor) -> None:
        """Write entries at these positions, counted from the start of the first block."""
        block_E = blocks_n[positions_E // self.block_size]
        for part, values in zip(self.parts, rows, strict=True):
            places_E = (positions_E % self.block_size // self.tokens).to(part.device)
            part[block_E.to(part.device), places_E] = values.to(part)


PagedCache = LayerCache | LatentCache | EntryCache


class ShardViews:
    """Shards of one rank's cache, in the order of the shards: of layers with rows of every token, then of states."""

    def __init__(self, kv: KvCache, share: CacheShare, shards: Sequence[CacheShard]) -> None:
        """Create the views. Raises ValueError for a layer that the cache does not have, or a border within a unit."""
        self.shards = shards
        self.numbers: list[int] = []  # of the layers on this rank
        self._block_size = kv.block_size
        self._num_position_shards: list[int] = []  # ranks that divide the positions of each layer of `paged`
        self.paged: list[PagedCache] = []
        self.states: list[tuple[RecurrentStateCache, list[Sequence[slice] | None]]] = []  # ranges of each part
        token_caches, state_caches, entry_caches = kv.token_caches, kv.state_caches, kv.entry_caches
        for shard in shards:
            number = shard.layer - share.first_layer
            self.numbers.append(number)
            bounds = share.range_of(shard)
            if number in entry_caches:  # its first shard has the entries, its second one the state
                self.paged.append(_entries(entry_caches.pop(number)))
                self._num_position_shards.append(1)
            elif number in state_caches:
                state = state_caches[number]
                self.states.append((state, [_ranges(part, shard, bounds) for part in state.specs]))
            elif number in token_caches:
                self.paged.append(_narrowed(token_caches[number], shard, bounds))
                self._num_position_shards.append(share.num_position_shards(shard.layer))
            else:
                raise ValueError(f"layer {shard.layer} has no cache on this rank")

    @property
    def form(self) -> Form:
        """Parts that each layer without a recurrent state stores for a token."""
        return tuple(tuple(_form_of(layer, part) for part in layer.parts) for layer in self.paged)

    @property
    def state_form(self) -> Form:
        """Parts of a sequence's state in each recurrent layer."""
        return tuple(
            tuple(
                TensorLayout(_name(part), tuple(_cut(part[0], spec, ranges).shape))
                for part, spec, ranges in zip(layer.parts, layer.specs, cuts, strict=True)
            )
            for layer, cuts in self.states
        )

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the first `num_tokens` tokens, and of a sequence's states."""
        return _num_bytes(self.shards, self.form, self.state_form, num_tokens)

    def read_rows(self, index: int, blocks_n: Tensor, first: int, end: int) -> list[Tensor]:
        """Return a copy of the rows of a shard's positions from `first` to `end` - 1, part by part.

        `index` counts the shards with rows of every token. Token `first` is in the first of the blocks.
        """
        num_ranks, positions = self._num_position_shards[index], self.shards[index].positions(first, end)
        begin = first // self._block_size * self._block_size
        layer = self.paged[index]
        if isinstance(layer, EntryCache):
            return layer.read(blocks_n, _tensor_of(positions).to(blocks_n.device) - begin)
        offset = positions.start // num_ranks - begin // num_ranks
        return read(layer, blocks_n, offset, len(positions), positions.step // num_ranks)

    def write_rows(self, index: int, rows: Sequence[Tensor], block_table: Tensor, positions: range) -> None:
        """Write the rows of these positions into the blocks of a sequence, converted to the cache's data types."""
        num_ranks, size = self._num_position_shards[index], self._block_size
        positions_T, layer = _tensor_of(positions), self.paged[index]
        if isinstance(layer, EntryCache):
            layer.write(rows, block_table, positions_T)
            return
        slots_T = block_table[positions_T // size] * (size // num_ranks) + positions_T % size // num_ranks
        device = layer.parts[0].device
        write(layer, [row.to(device) for row in rows], slots_T.to(device))

    def read_state(self, index: int, slot: int) -> list[Tensor]:
        """Return a copy of the state in a slot, part by part. `index` counts the shards of states."""
        layer, cuts = self.states[index]
        parts = zip(layer.parts, layer.specs, cuts, strict=True)
        return [_cut(part[slot], spec, ranges).clone() for part, spec, ranges in parts]

    def write_state(self, index: int, slot: int, values: Sequence[Tensor]) -> None:
        """Write a state into a slot, converted to the cache's data types."""
        layer, cuts = self.states[index]
        for part, spec, ranges, value in zip(layer.parts, layer.specs, cuts, values, strict=True):
            if ranges is None:
                part[slot].copy_(value)
                continue
            begin = 0
            for one in ranges:
                width = one.stop - one.start
                target = part[slot].narrow(spec.divided_dim, one.start, width)
                target.copy_(value.narrow(spec.divided_dim, begin, width))
                begin += width


def token_bytes(form: Form) -> int:
    """Return the bytes of one row of each layer."""
    return sum(layer_bytes(layer) for layer in form)


def announced_bytes(begin: Begin) -> int:
    """Return the bytes of what is announced, by its shards and layouts."""
    return _num_bytes(begin.shards, begin.form, begin.states, begin.num_tokens)


def layer_bytes(parts: Sequence[TensorLayout]) -> int:
    """Return the bytes of one row of one layer."""
    return sum(math.prod(part.shape) * _dtype(part).itemsize for part in parts)


def fits(form: Form, states: Form, own: ShardViews) -> bool:
    """Return whether KV and states of that layout have the shapes of these shards; the data types may differ."""
    if _shapes(states) != _shapes(own.state_form):
        return False
    mine = own.form
    return len(form) == len(mine) and all(_matches(layer, one) for layer, one in zip(form, mine, strict=True))


def read(
    layer: LayerCache | LatentCache, blocks_n: Tensor, offset: int, num_tokens: int, step: int = 1
) -> list[Tensor]:
    """Return every `step`-th token of each part of the layer's cache, from place `offset` of these blocks on.

    The returned tensors are contiguous.
    """
    rows = []
    for part in layer.parts:
        by_token = part.index_select(0, blocks_n).movedim(_token_dim(layer), 1)
        rows.append(by_token.flatten(0, 1)[offset : offset + num_tokens * step : step].contiguous())
    return rows


def write(layer: LayerCache | LatentCache, rows: Sequence[Tensor], slots_T: Tensor) -> None:
    """Write token t's rows into slot slots_T[t] = block · P + place, converted to the cache's data types."""
    if [part.dtype for part in layer.parts] == [part.dtype for part in rows]:
        for part, values in zip(layer.parts, rows, strict=True):
            by_token = part.movedim(_token_dim(layer), 1)
            places = by_token.shape[1]
            by_token[slots_T // places, slots_T % places] = values
    elif isinstance(layer, LatentCache):
        _write_latent(layer, rows, slots_T)
    else:
        write(layer, _converted(rows, layer), slots_T)


def _converted(rows: Sequence[Tensor], like: LayerCache) -> list[Tensor]:
    """Return keys and values in the data types of the cache, with scales if it has some."""
    k_TGd, v_TGd = _plain(rows)
    num_tokens = len(k_TGd)
    block = [part.new_empty(1, part.shape[1], num_tokens, *part.shape[3:]) for part in like.parts]
    kv_store(k_TGd, v_TGd, LayerCache(*block), torch.arange(num_tokens, device=k_TGd.device))
    return [part[0].transpose(0, 1) for part in block]


def _write_latent(layer: LatentCache, rows: Sequence[Tensor], slots_T: Tensor) -> None:
    values_TL, *others = rows
    if layer.index_keys_NPI is not None:
        keys_TI, *others = others
        layer.index_keys_NPI.flatten(0, 1)[slots_T] = keys_TI.to(layer.index_keys_NPI.dtype)
    scales = others
    parts = values_TL.float().tensor_split([layer.latent_width], dim=1)
    if scales:
        parts = tuple(part * scale_T[:, None] for part, scale_T in zip(parts, scales, strict=True))
    if layer.latent_scale_NP is not None and layer.rotated_scale_NP is not None:
        own = tuple(scale_of(part) for part in parts)
        parts = tuple(to_whole(part, scale_T1) for part, scale_T1 in zip(parts, own, strict=True))
        for scale_NP, scale_T1 in zip((layer.latent_scale_NP, layer.rotated_scale_NP), own, strict=True):
            scale_NP.view(-1)[slots_T] = scale_T1.squeeze(1)
    layer.rows_NPL.flatten(0, 1)[slots_T] = _within(torch.cat(parts, dim=1), layer.rows_NPL.dtype)


def views(buffer_B: Tensor, parts: Sequence[TensorLayout], num_tokens: int) -> list[Tensor]:
    """Return the parts of the chunk at the start of the buffer as tensors."""
    found, begin = [], 0
    for part in parts:
        end = begin + num_tokens * math.prod(part.shape) * _dtype(part).itemsize
        found.append(_typed(buffer_B[begin:end], _dtype(part)).view(num_tokens, *part.shape))
        begin = end
    return found


def _num_bytes(shards: Sequence[CacheShard], form: Form, states: Form, num_tokens: int) -> int:
    layers = zip(shards, form, strict=False)
    return token_bytes(states) + sum(len(one.positions(0, num_tokens)) * layer_bytes(parts) for one, parts in layers)


def _tensor_of(positions: range) -> Tensor:
    return torch.arange(positions.start, max(positions.start, positions.stop), positions.step)


def _typed(bytes_B: Tensor, dtype: torch.dtype) -> Tensor:
    aligned = bytes_B.data_ptr() % dtype.itemsize == 0
    return (bytes_B if aligned else bytes_B.clone()).view(dtype)


def _plain(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return keys and values in float32, with their scales applied."""
    if len(rows) == _NUM_SCALED_PARTS:
        k_TGd, v_TGd, k_scale_TG, v_scale_TG = rows
        return k_TGd.float() * k_scale_TG[..., None], v_TGd.float() * v_scale_TG[..., None]
    k_TGd, v_TGd = rows
    return k_TGd.float(), v_TGd.float()


def _entries(cache: CompressedCache) -> PagedCache:
    return cache.pages if cache.heads else EntryCache(cache.parts, cache.tokens_per_entry, cache.block_size)


def _narrowed(cache: LayerCache | LatentCache, shard: CacheShard, bounds: tuple[int, int]) -> LayerCache | LatentCache:
    """Return the shard of a cache that has the units `bounds`."""
    first, end = shard.first - bounds[0], shard.end - bounds[0]
    if (first, end) == (0, bounds[1] - bounds[0]):
        return cache
    if isinstance(cache, LatentCache) or not 0 <= first < end <= cache.k_NGPd.shape[1]:
        raise ValueError(f"layer {shard.layer} is not divided as {shard.num_units} units")
    return cache.of_heads(first, end)


def _ranges(spec: StatePart, shard: CacheShard, bounds: tuple[int, int]) -> Sequence[slice] | None:
    """Return the shard's ranges of a part's divided dimension, one in each section; None for the whole part."""
    num_held = bounds[1] - bounds[0]
    if not spec.sections or shard.end - shard.first == num_held:
        if shard.end - shard.first != num_held:
            raise ValueError(f"a state of layer {shard.layer} cannot be divided")
        return None
    found, begin = [], 0
    for index, width in enumerate(spec.sections):
        if index in spec.copied:
            found.append(slice(begin, begin + width))
            begin += width
            continue
        if width % num_held:
            raise ValueError(f"{width} values of a state of layer {shard.layer} cannot be divided by {num_held}")
        each = width // num_held
        found.append(slice(begin + (shard.first - bounds[0]) * each, begin + (shard.end - bounds[0]) * each))
        begin += width
    return found


def _cut(part: Tensor, spec: StatePart, ranges: Sequence[slice] | None) -> Tensor:
    """Return these ranges of one sequence's part of a state, one after the other."""
    if ranges is None:
        return part
    dim = spec.divided_dim
    return torch.cat([part.narrow(dim, one.start, one.stop - one.start) for one in ranges], dim=dim)


def _shapes(form: Form) -> list[list[tuple[int, ...]]]:
    return [[part.shape for part in layer] for layer in form]


def _is_latent(parts: Sequence[TensorLayout]) -> bool:
    return len(parts[0].shape) == 1


def _matches(parts: Sequence[TensorLayout], own: Sequence[TensorLayout]) -> bool:
    """Return whether a layer's parts are values of the same shapes, followed by no scales or by those of int8."""
    if _is_latent(own):
        values, num_scales = [part for part in own if part.shape], _NUM_LATENT_SCALES
    else:
        values, num_scales = list(own[:2]), _NUM_SCALED_PARTS - 2
    shapes, scales = [part.shape for part in values], [own[0].shape[:-1]] * num_scales
    return [part.shape for part in parts] in (shapes, shapes + scales)


def _within(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype is torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)


def _form_of(layer: PagedCache, part: Tensor) -> TensorLayout:
    shape = list(part.shape[1:])
    del shape[_token_dim(layer) - 1]
    return TensorLayout(_name(part), tuple(shape))


def _name(part: Tensor) -> str:
    return str(part.dtype).removeprefix("torch.")


def _token_dim(layer: PagedCache) -> int:
    return 2 if isinstance(layer, LayerCache) else 1


def _dtype(part: TensorLayout) -> torch.dtype:
    found = _DTYPES.get(part.dtype)
    if found is None:
        raise ValueError(f"unknown dtype {part.dtype[:64]!r}")
    return found

"""KV cache of which several ranks have a copy, and whose tokens they compute together (prefill context parallelism).

A step's tokens, and so the chunk of a long prompt, are divided among the ranks. In each layer every rank stores the
keys and values of its own tokens, and then those of all other ranks, before any of them attends. A rank without tokens
in a step only stores those of the others.

T tokens of a rank, B bytes of a token in one layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.kv_store.caches import LatentCache, LayerCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.batch import Cache

COPIED_TOKENS = 4096  # of a layer in one exchange, which bounds the memory for them


def share_rows(copies: RankCollectives, cache: Cache, rank_slots: Sequence[Tensor]) -> None:
    """Store what the other ranks have computed of a layer, whose cache has this rank's tokens already.

    `copies` are the ranks with a copy of the cache, `rank_slots` the slots of each rank's tokens, int64. All ranks
    with a copy must call this together. Nothing is done if no rank has a copy.
    """
    if copies.size == 1 or not rank_slots:
        return
    parts = _parts_of(cache)
    given = copies.all_gather_rows(_read(parts, rank_slots[copies.rank]), [len(slots_T) for slots_T in rank_slots])
    for rank, (slots_T, given_TB) in enumerate(zip(rank_slots, given, strict=True)):
        if rank != copies.rank and len(slots_T):
            _write(parts, slots_T, given_TB)


def copy_from_first(copies: RankCollectives, cache: Cache, slots_T: Tensor) -> None:
    """Copy what the first of the ranks with a copy of a layer's cache has in these slots, int64, to the others.

    All ranks with a copy must call this together.
    """
    parts = _parts_of(cache)
    for some_T in torch.split(slots_T.to(parts[0].device), COPIED_TOKENS):
        if not len(some_T):
            continue  # split returns one empty part of an empty tensor
        rows_TB = copies.broadcast_first(_read(parts, some_T))
        if copies.rank:
            _write(parts, some_T, rows_TB)


def _parts_of(cache: Cache) -> list[Tensor]:
    """Return the tensors of the cache, with the place in a block as their second dimension."""
    assert isinstance(cache, LayerCache | LatentCache), "only rows of tokens are shared"
    return [part.movedim(1 if isinstance(cache, LatentCache) else 2, 1) for part in cache.parts]


def _read(parts: Sequence[Tensor], slots_T: Tensor) -> Tensor:
    """Return the bytes in these slots, [T, B]."""
    block_T, place_T = slots_T // parts[0].shape[1], slots_T % parts[0].shape[1]
    return torch.cat([_bytes_of(part[block_T, place_T], _width(part)) for part in parts], dim=1)


def _write(parts: Sequence[Tensor], slots_T: Tensor, bytes_TB: Tensor) -> None:
    block_T, place_T = slots_T // parts[0].shape[1], slots_T % parts[0].shape[1]
    for part, own_TB in zip(parts, torch.split(bytes_TB, [_width(one) for one in parts], dim=1), strict=True):
        values = own_TB.contiguous().view(part.dtype)
        part[block_T, place_T] = values.view(len(slots_T), *part.shape[2:])


def _width(part: Tensor) -> int:
    return part[0, 0].numel() * part.element_size()


def _bytes_of(row: Tensor, width: int) -> Tensor:
    return row.reshape(len(row), width // row.element_size()).contiguous().view(torch.uint8)

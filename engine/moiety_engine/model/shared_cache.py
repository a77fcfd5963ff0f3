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


def share_rows(copies: RankCollectives, cache: Cache, rank_slots: Sequence[Tensor]) -> None:
    """Store what the other ranks have computed of a layer, whose cache has this rank's tokens already.

    `copies` are the ranks with a copy of the cache, `rank_slots` the slots of the tokens of each of them, int64. All of
    them must call this together. Nothing is done if no rank has a copy.
    """
    if copies.size == 1 or not rank_slots:
        return
    assert isinstance(cache, LayerCache | LatentCache), "only rows of tokens are shared"
    parts = [part.movedim(1 if isinstance(cache, LatentCache) else 2, 1) for part in cache.parts]
    own_T = rank_slots[copies.rank]
    block_T, place_T = own_T // parts[0].shape[1], own_T % parts[0].shape[1]
    rows = [part[block_T, place_T] for part in parts]
    widths = [part[0, 0].numel() * part.element_size() for part in parts]
    own_TB = torch.cat([_bytes_of(row, width) for row, width in zip(rows, widths, strict=True)], dim=1)
    given = copies.all_gather_rows(own_TB, [len(slots_T) for slots_T in rank_slots])
    for rank, (slots_T, given_TB) in enumerate(zip(rank_slots, given, strict=True)):
        if rank == copies.rank or not len(slots_T):
            continue
        block_T, place_T = slots_T // parts[0].shape[1], slots_T % parts[0].shape[1]
        for part, bytes_TB in zip(parts, torch.split(given_TB, widths, dim=1), strict=True):
            values = bytes_TB.contiguous().view(part.dtype)
            part[block_T, place_T] = values.view(len(slots_T), *part.shape[2:])


def _bytes_of(row: Tensor, width: int) -> Tensor:
    return row.reshape(len(row), width // row.element_size()).contiguous().view(torch.uint8)

"""Caches of rows in blocks, for kernels that read a sequence's rows through its block table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def scatter_rows(
    contexts: Sequence[int], places: int, width: int, make_rows: Callable[[int, int], Tensor] = torch.randn
) -> tuple[Tensor, Tensor]:
    """Return a cache [blocks, places, width] and the block table of sequences with as many rows as `contexts` says.

    The blocks are in random order, and the cache is NaN where no sequence has a row. `make_rows(context, width)` makes
    the rows of one sequence. Entries of the table beyond a sequence's blocks name a block that no sequence has.
    """
    counts = [-(-context // places) for context in contexts]
    cache = torch.full((sum(counts) + 2, places, width), float("nan"))
    blocks = torch.randperm(len(cache), dtype=torch.int32)
    table = torch.full((len(counts), max(counts)), int(blocks[-1]), dtype=torch.int32)
    for s, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        table[s, :count], blocks = blocks[:count], blocks[count:]
        rows: Tensor = cache[table[s, :count].long()].flatten(0, 1)
        rows[:context] = make_rows(context, width)
        cache[table[s, :count].long()] = rows.view(count, places, width)
    return cache, table


def query_starts(queries: Sequence[int]) -> Tensor:
    """Return the row at which each sequence's queries start, and their end."""
    return torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)

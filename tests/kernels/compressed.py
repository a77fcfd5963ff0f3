"""Inputs of compressed attention: runs of several sequences, some of which begin in the step."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from moiety_kernels.compressed_attention import Entries, TokenRuns

QUERIES = (1, 1, 7, 30, 3)  # tokens of each run
BEGINS = (40, 0, 5, 0, 2)  # positions of their first tokens
SLOTS = (3, 0, 5, 1, 2)
NUM_SLOTS = 6


def runs() -> TokenRuns:
    starts = [0, *itertools.accumulate(QUERIES)]
    return TokenRuns(
        torch.cat([torch.full((n,), r, dtype=torch.int32) for r, n in enumerate(QUERIES)]),
        torch.cat([torch.arange(begin, begin + n) for begin, n in zip(BEGINS, QUERIES, strict=True)]),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(SLOTS),
    )


def history(size: int, columns: int) -> Tensor:
    """Return rings in which only positions before the step have rows; the rest is NaN."""
    made = torch.full((NUM_SLOTS, size, columns), float("nan"))
    for begin, slot in zip(BEGINS, SLOTS, strict=True):
        for position in range(max(0, begin - size), begin):
            made[slot, position % size] = torch.randn(columns)
    return made


def closing(of: TokenRuns, rate: int) -> Tensor:
    return ((of.position_T + 1) % rate == 0).nonzero().squeeze(1)


def entries(of: TokenRuns, width: int, dtype: torch.dtype = torch.float32) -> Entries:
    """Entries of 20 blocks of 4 for each query: some have none; what a query does not see is NaN."""
    pool = torch.randn(20, 4, width).to(dtype)
    count = torch.minimum((of.position_T + 1) // 4, torch.tensor(6)).int()
    slot = torch.rand(len(count), 79).argsort(dim=1)[:, :6].int()
    pool.view(80, width)[79] = float("nan")
    return Entries(pool, slot.where(torch.arange(6) < count[:, None], 79), count)

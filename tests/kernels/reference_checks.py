"""Random inputs, poisoned memory and the error bound of comparisons with an operation's reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WEIGHTS = [torch.float32, torch.bfloat16]
CACHES = WEIGHTS if DEVICE == "cpu" else [torch.float32]  # beside float32 queries


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=DEVICE) * scale


def close(ours: Tensor, theirs: Tensor, ratio: float = 1e-5) -> bool:
    """Whether the largest error is below `ratio` of the largest value, which counts as 0.1 at least, since a sum that
    comes to nearly nothing is as inexact as what it sums; false for NaN."""
    return bool((ours - theirs).abs().max() <= ratio * theirs.abs().max().clamp(min=0.1))


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Fill freed memory that the next allocations are likely to get with NaN, so that no kernel relies on zeros."""
    for size in (1 << 8, 1 << 12, 1 << 16, 1 << 18):
        held = [torch.full((size,), float("nan"), device=DEVICE) for _ in range(4)]
        del held

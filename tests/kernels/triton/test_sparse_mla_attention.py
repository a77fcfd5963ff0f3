"""The Triton kernel of attention over selected latent rows agrees with its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants
from torch import Tensor

from moiety_kernels.kv_store.caches import LatentCache
from moiety_kernels.sparse_mla_attention import kernel, reference, sparse_mla_attention

COUNTS = [1, 1100, 17, 40, 3]  # of selected slots: of three decodes, and of two tokens of a prompt
NUM_DECODE = 3
BLOCKS, PLACES = 80, 16


def arguments(
    heads: int, latent: int, rotated: int, dtype: torch.dtype, device: str, kept: torch.dtype | None = None
) -> tuple[Tensor, LatentCache, Tensor, Tensor, float]:
    """Queries, a cache, slots, their counts and a scale.

    The cache is NaN (or 127, with scales that are NaN) where no slot is selected.
    """
    width, most = latent + rotated, max(COUNTS)
    slots = torch.stack([torch.randperm(BLOCKS * PLACES - 1)[:most] for _ in COUNTS]).int()
    rows = torch.full((BLOCKS * PLACES, width), float("nan"))
    for row, count in zip(slots, COUNTS, strict=True):
        rows[row[:count].long()] = torch.randn(count, width)
        row[count:] = BLOCKS * PLACES - 1
    cache = rows.view(BLOCKS, PLACES, width)
    q, counts = torch.randn(len(COUNTS), heads, width).to(device, dtype), torch.tensor(COUNTS, dtype=torch.int32)
    chosen = slots.to(device), counts.to(device), width**-0.5
    if kept is not torch.int8:
        return q, LatentCache(cache.to(device, kept or dtype), latent), *chosen
    scales = [torch.where(cache[..., 0].isnan(), torch.nan, torch.rand(cache.shape[:2]) * 0.02 + 0.02) for _ in "lr"]
    of_entry = torch.repeat_interleave(torch.stack(scales, 2), torch.tensor([latent, rotated]), 2)
    whole = (cache / of_entry).clamp(-127, 127).nan_to_num(127).to(torch.int8)
    return q, LatentCache(whole.to(device), latent, *(scale.to(device) for scale in scales)), *chosen


def assert_agrees(
    module: Any,
    heads: int,
    latent: int,
    rotated: int,
    dtype: torch.dtype,
    device: str,
    kept: torch.dtype | None = None,
) -> None:
    args = arguments(heads, latent, rotated, dtype, device, kept)
    tolerance = {"rtol": 4e-3, "atol": 4e-3} if dtype is torch.float16 else {"rtol": 2e-5, "atol": 2e-5}
    ours = module.sparse_mla_attention(*args, num_decode=NUM_DECODE)
    torch.testing.assert_close(ours, reference.sparse_mla_attention(*args), **tolerance)


@pytest.mark.parametrize(
    ("heads", "latent", "rotated", "dtype", "kept"),
    [
        (3, 32, 16, torch.float32, None),
        (16, 512, 64, torch.float16, None),
        (70, 64, 32, torch.float16, torch.float8_e4m3fn),
        (3, 32, 16, torch.float32, torch.int8),
    ],
)
def test_the_selected_rows_are_attended_to(
    heads: int, latent: int, rotated: int, dtype: torch.dtype, kept: torch.dtype | None, device: str
) -> None:
    assert_agrees(kernel, heads, latent, rotated, dtype, device, kept)


def test_sparse_attention_without_the_kernel_attends_to_the_selected_rows() -> None:
    for kept in (None, torch.int8):
        args = arguments(3, 32, 16, torch.float32, "cpu", kept)
        ours = sparse_mla_attention(*args, num_decode=NUM_DECODE)
        torch.testing.assert_close(ours, reference.sparse_mla_attention(*args), rtol=2e-5, atol=2e-5)


def test_a_query_has_the_same_bits_alone_and_beside_others(device: str) -> None:
    q, cache, slots, counts, scale = arguments(5, 32, 16, torch.float16, device)
    together = kernel.sparse_mla_attention(q, cache, slots, counts, scale, num_decode=NUM_DECODE)
    for t, decoded in ((1, 1), (3, 0)):
        one = slots[t : t + 1], counts[t : t + 1], scale
        alone = kernel.sparse_mla_attention(q[t : t + 1], cache, *one, num_decode=decoded)
        assert torch.equal(alone, together[t : t + 1])


@mutants(
    {
        "p_slot + token * slot_row": "p_slot",
        "begin = split * length": "begin = 0",
        "tl.minimum(begin + length, count)": "begin + length",
        "b_max + tl.log2(b_total)": "b_max",
        "b_scale = 1.0 / b_total": "b_scale = 1.0",
        "(token * num_splits + split) * num_heads": "(token * num_splits) * num_heads",
        "p_out + (token * num_heads + i_head) * V": "p_out + i_head * V",
    }
)
def test_a_mutant_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(kernel, edit) as mutant:
        assert_agrees(mutant, 3, 32, 16, torch.float32, device)

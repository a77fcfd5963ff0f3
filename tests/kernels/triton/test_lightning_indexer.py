"""The Triton kernels of the lightning indexer select what its definition selects, and so does sparse attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants
from tests.kernels.paged_rows import query_starts, scatter_rows
from torch import Tensor

from moiety_kernels.lightning_indexer import kernel, reference
from moiety_kernels.paged_attention.inputs import AttentionMetadata

QUERIES, CONTEXTS = [1, 1, 1, 5, 3], [1, 40, 1500, 90, 3]
PLACES, TOP_K = 16, 37


def few_valued_rows(context: int, width: int) -> Tensor:
    return torch.randint(-1, 2, (context, width)).float()


def arguments(
    heads: int, width: int, dtype: torch.dtype, device: str, *, few_values: bool = False
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    """Index queries and keys, NaN where no context is; with `few_values` many tokens have the same score."""
    keys, table = scatter_rows(CONTEXTS, PLACES, width, few_valued_rows if few_values else torch.randn)
    starts = query_starts(QUERIES)
    q, weight = torch.randn(sum(QUERIES), heads, width), torch.randn(sum(QUERIES), heads)
    if few_values:
        q, weight = q.sign() * (torch.rand(q.shape) < 2 / width), weight.sign()
    lengths = torch.tensor(CONTEXTS, dtype=torch.int32)
    starts, lengths, table = (one.to(device) for one in (starts, lengths, table))
    metadata = AttentionMetadata(starts, lengths, table, max(QUERIES), max(CONTEXTS), num_decode=3)
    return q.to(device, dtype), weight.to(device), keys.to(device, dtype), metadata


def assert_agrees(module: Any, *args: Any, top_k: int = TOP_K, **how: Any) -> None:
    inputs = arguments(*args, **how)
    slots, counts = module.select_tokens(*inputs, top_k)
    expected, expected_counts = reference.select_tokens(*inputs, top_k)
    assert torch.equal(counts, expected_counts)
    for row, expected_row, count in zip(slots, expected, counts.tolist(), strict=True):
        assert torch.equal(row[:count], expected_row[:count])


@pytest.mark.parametrize(("heads", "width", "dtype"), [(16, 32, torch.float16), (5, 24, torch.float32)])
@pytest.mark.parametrize("few_values", [False, True])
def test_the_same_tokens_are_selected(
    heads: int, width: int, dtype: torch.dtype, few_values: bool, device: str
) -> None:
    assert_agrees(kernel, heads, width, dtype, device, few_values=few_values)


def test_equal_scores_are_counted_over_several_blocks(device: str) -> None:
    assert_agrees(kernel, 5, 24, torch.float32, device, few_values=True, top_k=1400)


def test_rows_that_are_scored_in_turn_select_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_SCORE_BYTES", 3 * 4 * 2048)
    assert_agrees(kernel, 16, 32, torch.float16, device)


@mutants(
    {
        "tl.maximum(b_product, 0.0)": "b_product",
        "b_rank <= left": "b_rank < left",
        "(b_value > found) | (m_equal": "(b_value > found) & (m_equal",
        "tl.where(i_bin > chosen": "tl.where(i_bin >= chosen",
        "b_bits ^ 0xFFFFFFFF": "b_bits",
        "mask=m_take, other=0)\n        tl.store": "mask=m_take, other=0) * 0\n        tl.store",
        "num_equal += ": "num_equal += 0 * ",
        "m_here = m_here & (b_value": "m_here = m_here | (b_value",
    }
)
def test_a_mutant_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(kernel, edit) as mutant:
        for few_values, top_k in ((False, TOP_K), (True, TOP_K), (True, 1400)):
            assert_agrees(mutant, 5, 24, torch.float32, device, few_values=few_values, top_k=top_k)

"""The Triton kernel of RMS normalisation agrees with its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants

from moiety_kernels.rms_norm import kernel, reference

SHAPES = [(1, 1), (3, 7), (5, 64), (2, 1000), (7, 2880)]


def assert_agrees(kernels: Any, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Both forms on rows that lie apart, so that what overruns a row shows."""
    x = torch.randn(rows, width + 3, device=device).to(dtype)[:, :width]
    delta = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.rand(width, device=device) + 0.5
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype is torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), **tolerance)
    total, normed = kernels.add_rms_norm(x, delta, weight, 1e-6)
    expected_total, expected = reference.add_rms_norm(x, delta, weight, 1e-6)
    torch.testing.assert_close(total, expected_total, rtol=0, atol=0)
    torch.testing.assert_close(normed, expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rows_are_normalised(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    assert_agrees(kernel, rows, width, dtype, device)


def test_addresses_go_beyond_32_bits(untouched: Any, device: str) -> None:
    width, apart = 40, 1 << 31
    x, delta = (
        untouched(apart + width, torch.float16).as_strided((2, width), (apart, 1)).copy_(torch.randn(2, width))
        for _ in range(2)
    )
    weight, near = torch.rand(width, device=device), (x.contiguous(), delta.contiguous())
    ours, theirs = kernel.rms_norm(x, weight, 1e-6), reference.rms_norm(near[0], weight, 1e-6)
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
    made = zip(
        kernel.add_rms_norm(near[0], delta, weight, 1e-6), reference.add_rms_norm(*near, weight, 1e-6), strict=True
    )
    for ours, theirs in made:
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


def test_no_rows_are_no_work(device: str) -> None:
    assert kernel.rms_norm(torch.empty(0, 8, device=device), torch.ones(8, device=device), 1e-6).shape == (0, 8)


@mutants(
    {
        "m_column = i_column < width": "m_column = i_column < BLOCK",
        "/ width + eps": "/ BLOCK + eps",
        "tl.load(p_delta + i_row * delta_stride": "tl.load(p_delta + i_row * x_stride",
    }
)
def test_a_mutant_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(kernel, edit) as mutant:
        assert_agrees(mutant, 3, 7, torch.float32, device)

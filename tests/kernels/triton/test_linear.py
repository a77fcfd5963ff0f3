"""The invariant linear maps in Triton agree with their definition, and a row's bits are its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants, mutants_by
from torch import Tensor

from moiety_kernels.checks import KernelInputError
from moiety_kernels.head_linear import head_linear as head_linear_operation
from moiety_kernels.head_linear import reference as head_reference
from moiety_kernels.linear import kernel, reference, tiles
from moiety_kernels.linear import linear as linear_operation
from moiety_kernels.quantization import FP8, INT4, INT8, MXFP4, QuantizedWeight, dequantize, quantize

ALL_TILES = (*tiles.HOPPER, *tiles.PORTABLE, *tiles.SINGLE)
BLOCKS = replace(FP8, group=128, rows=128)
EIGHT_BITS = {"int8": INT8, "fp8 rows": FP8, "fp8 blocks": BLOCKS}
FOUR_BITS = {"int4": replace(INT4, pack=64), "mxfp4": replace(MXFP4, pack=64)}


def apart(rows: int, width: int, dtype: torch.dtype, device: str, gap: int = 5) -> Tensor:
    """Return rows with NaN between them, so that a row that is written or read beyond its end shows."""
    x = torch.randn(rows, width + gap, device=device).to(dtype)
    x[:, width:] = float("nan")
    return x[:, :width]


def assert_agrees(
    kernels: Any, tile: tiles.Tile, rows: int, columns: int, inner: int, dtype: torch.dtype, device: str, gap: int = 5
) -> None:
    """With a bias and without."""
    x, weight = apart(rows, inner, dtype, device, gap), apart(columns, inner, dtype, device, gap) / inner**0.5
    tolerance = {"rtol": 3e-3, "atol": 3e-3} if dtype is torch.float16 else {"rtol": 2e-5, "atol": 2e-5}
    for bias in (None, torch.randn(columns, device=device)):
        ours = kernels.linear(x, weight, bias, tile=tile)
        torch.testing.assert_close(ours, reference.linear(x, weight, bias), **tolerance)


def narrow(columns: int, inner: int, form: Any, device: str) -> QuantizedWeight:
    """A weight in few bits; of blocks one has 128 rows and the next the rest."""
    weight = torch.randn(columns, inner, device=device) / inner**0.5
    if form != BLOCKS:
        return quantize(weight, form)
    scales = (torch.rand(2, -(-inner // 128), device=device) + 0.5) / 100
    rows = scales.repeat_interleave(128, 0)[:columns].contiguous()
    return QuantizedWeight((weight * 100).to(torch.float8_e4m3fn), rows, form)


def assert_narrow_agrees(
    kernels: Any, tile: tiles.Tile, rows: int, columns: int, inner: int, form: Any, device: str, gap: int = 8
) -> None:
    """A product is that with the weight it stands for. Of four bits inputs have sixteen."""
    weight, bias = narrow(columns, inner, form, device), torch.randn(columns, device=device)
    dtype = torch.float16 if form.bits == 4 else torch.float32
    x = apart(rows, inner, dtype, device, gap)
    tolerance = 3e-3 if form.bits == 4 else 2e-5
    assert kernels.unfit_narrow(x, weight) is None
    ours, theirs = kernels.linear(x, weight, bias, tile=tile), reference.linear(x, dequantize(weight), bias)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def assert_heads_agree(kernels: Any, tile: tiles.Tile, device: str) -> None:
    x = apart(19 * 3, 40, torch.float32, device, 8).unflatten(0, (19, 3))
    weight = torch.randn(3, 70, 40, device=device)
    expected = head_reference.head_linear(x, weight)
    torch.testing.assert_close(kernels.head_linear(x, weight, tile=tile), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tile", ALL_TILES, ids=lambda tile: tile.name)
def test_products_agree_with_copies_by_the_engine_and_by_addresses(tile: tiles.Tile, device: str) -> None:
    assert_agrees(kernel, tile, 70, 133, 72, torch.float32, device, 4)
    assert_agrees(kernel, tile, 3, 67, 37, torch.float32, device)


def test_products_of_sixteen_bits_and_of_a_weight_that_is_narrower_agree(device: str) -> None:
    assert_agrees(kernel, tiles.HOPPER[0], 18, 96, 136, torch.float16, device, 8)
    x, weight = torch.randn(5, 40, device=device), torch.randn(9, 40, device=device).half()
    torch.testing.assert_close(kernel.linear(x, weight), reference.linear(x, weight), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", EIGHT_BITS)
@pytest.mark.parametrize("tile", tiles.NARROW, ids=lambda tile: tile.name)
def test_weights_of_eight_bits_are_widened_and_scaled(tile: tiles.Tile, kind: str, device: str) -> None:
    assert_narrow_agrees(kernel, tile, 70, 133, 288, EIGHT_BITS[kind], device)


@pytest.mark.parametrize("tile", [tiles.NARROW[0], tiles.PORTABLE[1], tiles.SINGLE[1]], ids=lambda tile: tile.name)
def test_rows_that_the_copy_engine_cannot_fetch_meet_narrow_weights(tile: tiles.Tile, device: str) -> None:
    assert_narrow_agrees(kernel, tile, 3, 67, 96, INT8, device, gap=5)
    assert_narrow_agrees(kernel, tile, 5, 131, 160, BLOCKS, device, gap=5)


@pytest.mark.parametrize("kind", FOUR_BITS)
@pytest.mark.parametrize("tile", [*tiles.FOUR, tiles.PORTABLE[0]], ids=lambda tile: tile.name)
def test_weights_of_four_bits_are_widened_and_scaled(tile: tiles.Tile, kind: str, device: str) -> None:
    assert_narrow_agrees(kernel, tile, 20, 133, 192, FOUR_BITS[kind], device)
    assert_narrow_agrees(kernel, tile, 3, 67, 128, FOUR_BITS[kind], device, gap=5)


def test_a_narrow_weight_that_no_kernel_reads_is_said_why(device: str) -> None:
    x = torch.randn(3, 128, device=device)
    assert kernel.unfit_narrow(x, narrow(4, 128, INT8, device)) is None
    for form, why in (
        (INT4, "beside weights of 4 bits inputs are torch.float32"),
        (replace(FP8, group=64, rows=64), "not of 64 by 64"),
    ):
        weight = QuantizedWeight(torch.zeros(4, 128, device=device), torch.ones(4, 2, device=device), form)
        assert why in str(kernel.unfit_narrow(x, weight))
    assert "int4" in str(kernel.unfit_narrow(x.half(), narrow(4, 128, INT4, device)))


@pytest.mark.parametrize("tile", [tiles.HOPPER[0], tiles.PORTABLE[1]], ids=lambda tile: tile.name)
def test_heads_have_weights_of_their_own(tile: tiles.Tile, device: str) -> None:
    assert_heads_agree(kernel, tile, device)


def test_no_rows_are_no_work_and_what_is_not_taken_is_said(device: str) -> None:
    weight = torch.randn(6, 8, device=device)
    assert kernel.linear(torch.empty(0, 8, device=device), weight).shape == (0, 6)
    assert kernel.unfit(torch.randn(2, 1, 8), weight[None]) is None
    assert "do not lie next to each other" in str(kernel.unfit(torch.randn(2, 1, 8), torch.randn(1, 8, 6).mT))
    assert "float64" in str(kernel.unfit(torch.randn(2, 1, 8).double(), weight[None]))


def test_addresses_go_beyond_32_bits(untouched: Any, device: str) -> None:
    apart_by = 1 << 30
    far = untouched(3 * apart_by, torch.float16)  # but for the rows
    x = far.as_strided((3, 40), (apart_by, 1)).copy_(torch.randn(3, 40))
    weight = torch.randn(20, 40, device=device).half()
    ours = kernel.linear(x, weight, tile=tiles.PORTABLE[0])
    torch.testing.assert_close(ours, reference.linear(x.contiguous(), weight), rtol=3e-3, atol=3e-3)


def telling(*shape: int) -> Tensor:
    """Numbers whose products with small whole ones add up exactly within a step of 64, and are rounded from one to the
    next, so that results tell in what steps they were summed, and nothing of the order within one."""
    step = torch.arange(shape[-1]) // 64
    return torch.randint(-8, 9, shape) * 2.0 ** (-8.0 - 17.0 * (step > 0) - step)


def assert_same_bits(kernels: Any, device: str) -> None:
    """Assert that row 25 has the same bits among the rows from `first` to `last`, for every tile."""
    x, weight = telling(140, 200).to(device), torch.randint(-8, 9, (70, 200), device=device).float()
    bias = torch.randn(70, device=device)
    alone = kernels.linear(x[25:26], weight, bias, tile=tiles.HOPPER[0])[0]
    for tile in (*tiles.HOPPER, *tiles.PORTABLE):
        for first, last in ((0, 140), (25, 26), (20, 37)):
            ours = kernels.linear(x[first:last], weight, bias, tile=tile)[25 - first]
            assert torch.equal(ours, alone), (tile.name, first, last)


def test_a_row_has_the_same_bits_alone_and_in_any_batch_whatever_tile_is_taken(device: str) -> None:
    assert_same_bits(kernel, device)
    x, weight = telling(140, 200).to(device), torch.randint(-8, 9, (70, 200), device=device).float()
    ours, shorter = (kernel.linear(x, weight, tile=tile) for tile in (tiles.HOPPER[0], tiles.SINGLE[0]))
    assert not torch.equal(ours, shorter), "shorter steps went unnoticed"


@pytest.mark.parametrize("tuple_of_tiles", [tiles.HOPPER, tiles.NARROW, tiles.FOUR, tiles.PORTABLE, tiles.SINGLE])
def test_all_tiles_that_may_be_chosen_sum_in_the_same_steps(tuple_of_tiles: Any) -> None:
    assert len({tile.BK for tile in tuple_of_tiles}) == 1
    chosen = {tiles.choose(tuple_of_tiles, rows, 4096, 132) for rows in (1, 16, 17, 64, 65, 300, 8192)}
    assert chosen == set(tuple_of_tiles)


def test_invariant_results_are_given_or_refused_with_the_reason() -> None:
    x, weight = torch.randn(40, 64), torch.randn(24, 64)
    heads, of_heads = torch.randn(40, 3, 64), torch.randn(3, 24, 64)
    assert torch.equal(linear_operation(x, weight, invariant=True)[7:8], linear_operation(x[7:8], weight))
    together = head_linear_operation(heads, of_heads, invariant=True)
    assert torch.equal(together[7:8], head_linear_operation(heads[7:8], of_heads))
    with pytest.raises(KernelInputError, match="invariant results on a CPU"):
        linear_operation(x[:, :37], weight[:, :37], invariant=True)
    with pytest.raises(KernelInputError, match="invariant results on a CPU"):
        head_linear_operation(heads.double(), of_heads.double(), invariant=True)


@mutants(
    {
        "m_row = i_row < num_rows": "m_row = i_row < num_rows - 1",
        "m_column = i_column < width": "m_column = i_column < width - 1",
        "(k + i_k < inner)[None, :]": "(k + i_k < inner + 1)[None, :]",
        "head.to(tl.int64) * x_head_stride": "head.to(tl.int64) * x_stride",
        "num_heads + head)[:, None]": "num_heads)[:, None]",
        "load_weights(w, head, column": "load_weights(w, head, column + 1",
        "x.load([first, k])": "x.load([0, k])",
        "tl.load(p_bias + i_column": "tl.load(p_bias + i_column - column",
    }
)
def test_a_mutant_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(kernel, edit) as mutant:
        assert_agrees(mutant, tiles.HOPPER[0], 20, 133, 72, torch.float32, device, 4)
        assert_agrees(mutant, tiles.HOPPER[0], 3, 67, 37, torch.float32, device)
        assert_heads_agree(mutant, tiles.HOPPER[0], device)


@mutants_by(
    "kind",
    {
        "int8": {"tl.load(p_scale + i_column, mask": "tl.load(p_scale + i_column - column, mask"},
        "fp8 rows": {'if SCALES == "row":': 'if SCALES == "none":'},
        "fp8 blocks": {
            "SCALE_BLOCK) + k // SCALE_BLOCK": "SCALE_BLOCK)",
            "p_scale + i_column.to(tl.int64)": "p_scale + (i_column - column).to(tl.int64)",
            "sums += step": "sums = step",
        },
        "int4": {"sums, head, first, column": "sums, head, 0, column"},
    },
)
def test_a_mutant_that_reads_narrow_weights_otherwise_is_found(
    failing_mutant: FailingMutant, kind: str, edit: Edit, device: str
) -> None:
    four = kind in FOUR_BITS
    with failing_mutant(kernel, edit) as mutant:
        form, tile = (FOUR_BITS | EIGHT_BITS)[kind], (tiles.FOUR if four else tiles.NARROW)[0]
        assert_narrow_agrees(mutant, tile, 20, 133, 192 if four else 288, form, device)


def test_a_mutant_that_sums_tall_tiles_backwards_is_found(mutated: Any, device: str) -> None:
    backwards = (
        "for j in range(0, inner, BK):\n                k = j if BM == 16 else (tl.cdiv(inner, BK) - 1) * BK - j"
    )
    mutant = mutated(kernel, "for k in range(0, inner, BK):", backwards)
    assert_agrees(mutant, tiles.HOPPER[1], 70, 133, 72, torch.float32, device, 4)
    with pytest.raises(AssertionError):
        assert_same_bits(mutant, device)

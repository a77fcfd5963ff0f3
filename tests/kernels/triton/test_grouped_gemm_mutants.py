"""Changed kernels of the grouped products disagree with their definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants, mutants_by

from moiety_kernels.grouped_gemm import tile_cost_model
from moiety_kernels.grouped_gemm.kernels import down, four_bits, rounding, rows, up

from .grouped_products import (
    Case,
    assert_down_agrees,
    assert_eight_bits_agree,
    assert_four_bits_agree,
    assert_rounded_alike,
    assert_rows_agree,
    assert_sums_agree,
    assert_up_agrees,
)


@mutants(
    {
        "p_step + 1,": "p_step,",
        "p_step + hidden * num_groups,": "p_step,",
        "multiply(x_high, high, multiply(x_low, low, up": "multiply(x_low, high, multiply(x_low, low, up",
        "inner.load([first, k + HALF])": "inner.load([first, k])",
        "nibbles.to(tl.int8) - 8": "nibbles.to(tl.int8) - 7",
        "expert.to(tl.int64) * width": "expert.to(tl.int64) * hidden",
    }
)
def test_a_mutant_of_the_products_with_four_bits_is_found(
    failing_mutant: FailingMutant, monkeypatch: pytest.MonkeyPatch, edit: Edit, device: str
) -> None:
    with failing_mutant(four_bits, edit) as mutant:
        monkeypatch.setattr(up, "up_sums", mutant.up_sums)
        monkeypatch.setattr(down, "down_sums", mutant.down_sums)
        assert_four_bits_agree(
            up, down, "int4", tile_cost_model.FOUR[0], Case((3, 0, 18), 192, 64, torch.float16, device=device)
        )


@mutants_by(
    "narrow",
    {
        "int8": {"tl.load(p_column_scale + hidden,": "tl.load(p_column_scale,"},
        "fp8": {
            "p_up_scale = p_gate_scale + hidden * across": "p_up_scale = p_gate_scale",
            "p_gate_scale + k // SCALE_BLOCK": "p_gate_scale",
            "2 * hidden + column) * across": "2 * hidden) * across",
        },
    },
)
def test_a_mutant_that_scales_otherwise_is_found(mutated: Any, narrow: str, edit: Edit, device: str) -> None:
    mutant = mutated(up, *edit)
    with pytest.raises(AssertionError):
        assert_up_agrees(
            mutant, tile_cost_model.NARROW[1], Case((3, 0, 18), 208, 144, torch.float16, narrow=narrow, device=device)
        )


@mutants_by(
    "module",
    {
        up: {
            "w_gate, gate, row_scale,": "w_gate, gate, row_scale * 0 + 1.0,",
            "p_row_scale + k // BK": "p_row_scale",
            "tl.where(m_column[None, :], inner, 0.0)": "inner",
            "tl.cdiv(hidden, BN) + column // BN": "tl.cdiv(hidden, BN)",
        },
        down: {
            "p_row_scale + k // BK": "p_row_scale",
            "tl.cdiv(hidden, BK) if EIGHT": "tl.cdiv(width, BK) if EIGHT",
        },
    },
)
def test_a_mutant_that_scales_rounded_rows_otherwise_is_found(
    mutated: Any, noticed: Any, module: Any, edit: Edit, device: str
) -> None:
    kernels = {up: up, down: down} | {module: mutated(module, *edit)}
    with pytest.raises(noticed):
        assert_eight_bits_agree(
            kernels[up],
            kernels[down],
            tile_cost_model.EIGHT[-1],
            Case((3, 0, 18), 208, 144, narrow="fp8", device=device),
        )


@mutants(
    {
        "mask=m_column, other=0.0).to(tl.float32)": "mask=i_column >= 0, other=0.0).to(tl.float32)",
        "row * num_groups + i_group": "row + i_group",
    }
)
def test_a_mutant_of_the_rounding_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(rounding, edit) as mutant:
        assert_rounded_alike(mutant, Case((3, 0, 4), 1168, device=device))


# What a mutant writes where it should not stays within the tensor, or within what the allocator adds to an odd length:
# the last tile is full, and a row that is too long is so by one.
MUTANT_COUNTS = (3, 0, 70, 64)


@mutants(
    {
        "m_column = i_column < hidden": "m_column = i_column < hidden + 1",
        "m_row = i_row < end": "m_row = i_row < first + BM",
        "load_weights(w, expert, column": "load_weights(w, expert + 1, column",
        "load_weights(w, expert, hidden + column": "load_weights(w, expert, column",
        "if EVEN else m_row[:, None] & (k + i_k < width)[None, :]": "if EVEN else m_row[:, None]",
        "end - first <= TAIL:": "end - first >= TAIL:",
        "p_bias + expert.to(tl.int64) * 2 * hidden": "p_bias + expert.to(tl.int64) * hidden",
    }
)
def test_a_mutant_of_the_first_product_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(up, edit) as mutant:
        for config in (tile_cost_model.HOPPER[1], tile_cost_model.HOPPER[-2]):
            assert_up_agrees(mutant, config, Case(MUTANT_COUNTS, 72, 67, biases=True, device=device))


@mutants(
    {
        "m_column = i_column < width\n    if": "m_column = i_column < width + 1\n    if",
        "m_row = i_row < end": "m_row = i_row < first + BM",
        "load_weights(w, expert, column": "load_weights(w, expert + 1, column",
        "inner.load([first, k])": "inner.load([first + 1, k])",
        "sums * share[None, :]": "sums",
        "p_weight + pair": "p_weight + i_row",
    }
)
def test_a_mutant_of_the_second_product_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(down, edit) as mutant:
        assert_down_agrees(mutant, tile_cost_model.HOPPER[1], Case(MUTANT_COUNTS, 133, 40, device=device))


@mutants(
    {
        "expert * expert_stride + k": "k",
        "p_w += expert.to(tl.int64) * expert_stride": "p_w += expert.to(tl.int64) * row_stride",
        "m_k = k + i_k < width": "m_k = k + i_k < width + 5",
        "(hidden + i_column).to": "(i_column).to",
    }
)
def test_a_mutant_of_the_row_products_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(rows, edit) as mutant:
        assert_rows_agree(mutant, Case((0, 2, 1), 72, 40, biases=True, device=device))


@mutants(
    {
        "p_up_scale = p_gate_scale + hidden * across": "p_up_scale = p_gate_scale",
        "p_gate_scale + (k + i_k) // SCALE_BLOCK": "p_gate_scale + k // SCALE_BLOCK + 0 * i_k",
        "2 * hidden + column) * across": "2 * hidden) * across",
        "(expert * width + column) * across": "(expert * width) * across",
        "p_across + (k + i_k) // SCALE_BLOCK": "p_across + (k + 0 * i_k) // SCALE_BLOCK",
    }
)
def test_a_mutant_of_the_row_products_that_scales_otherwise_is_found(
    failing_mutant: FailingMutant, edit: Edit, device: str
) -> None:
    with failing_mutant(rows, edit) as mutant:
        assert_rows_agree(mutant, Case((0, 2, 1), 208, 144, narrow="fp8", device=device))


def test_a_mutant_of_the_sum_is_found(failing_mutant: FailingMutant, device: str) -> None:
    with failing_mutant(down, ("p_rows + token * TOP_K * width", "p_rows + token * width")) as mutant:
        assert_sums_agree(mutant, device)

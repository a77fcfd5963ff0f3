"""The grouped products agree with their definition, tile by tile, however the rows fall to the experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_kernels.checks import KernelInputError
from moiety_kernels.gpu.targets import H200
from moiety_kernels.grouped_gemm import kernel, reference, tile_cost_model
from moiety_kernels.grouped_gemm.kernels import down, rounding, rows, up
from moiety_kernels.moe import GELU_TANH, RELU2, SILU, Activation
from moiety_kernels.moe import experts as moe_experts
from moiety_kernels.moe.reference import experts as experts_reference
from moiety_kernels.quantization import INT4, INT8, quantize
from moiety_kernels.route import group

from .grouped_products import (
    CLIPPED,
    FOUR_BITS,
    Case,
    assert_down_agrees,
    assert_eight_bits_agree,
    assert_four_bits_agree,
    assert_rounded_alike,
    assert_rows_agree,
    assert_sums_agree,
    assert_up_agrees,
)

LIMITED = Activation("limited_silu", 0.5)
SCALED = Activation("scaled_silu", alpha=0.6)
COUNTS: dict[str, Any] = {
    "few, many and none": (0, 1, 7, 65),
    "one expert": (0, 0, 20),
    "skewed": (40, 9, 3, 2, 0, 1, 0, 1),
    "mostly none": (0,) * 60 + (3,) + (0,) * 66 + (2,),
}


@pytest.mark.parametrize(
    ("config", "counts"),
    [(config, counts) for config in tile_cost_model.HOPPER[1:] for counts in COUNTS.values()]
    + [(config, COUNTS["few, many and none"]) for config in (*tile_cost_model.PORTABLE[1:], *tile_cost_model.SINGLE)],
    ids=lambda value: getattr(value, "name", None),
)
def test_products_agree_however_rows_fall_to_experts(config: Any, counts: Any, device: str) -> None:
    case = Case(counts, device=device)
    assert_up_agrees(up, config, case)
    assert_down_agrees(down, config, case)


@pytest.mark.parametrize(
    "config", [tile_cost_model.HOPPER[1], tile_cost_model.HOPPER[-1], tile_cost_model.PORTABLE[2]], ids=lambda c: c.name
)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, CLIPPED, LIMITED, SCALED, RELU2], ids=lambda a: a.kind)
def test_biases_and_activations_in_sixteen_bits(config: Any, activation: Activation, device: str) -> None:
    case = Case((3, 0, 18), 136, 72, torch.float16, activation, biases=True, device=device)
    assert_up_agrees(up, config, case)
    assert_down_agrees(down, config, case)


@pytest.mark.parametrize("narrow", ["", "int8", "fp8 rows", "fp8"])
def test_experts_without_gates(narrow: str, device: str) -> None:
    kind: dict[str, Any] = {"activation": RELU2, "biases": True, "narrow": narrow, "device": device}
    config = tile_cost_model.NARROW[1] if narrow else tile_cost_model.HOPPER[-1]
    assert_up_agrees(up, config, Case((3, 0, 18), 208, 144, torch.float16, **kind))
    assert_rows_agree(rows, Case((0, 2, 1), 141, 77, **kind))
    if narrow.startswith("fp8"):
        assert_eight_bits_agree(up, down, tile_cost_model.EIGHT[0], Case((3, 0, 18), 208, 144, **kind))
    elif not narrow:
        case = Case((2, 1, 0), 40, 24, **kind)
        inputs = case.x, case.weight, case.expert, case.gate_up, case.down
        biases = {"gate_up_bias_E2F": case.gate_up_bias, "down_bias_ED": case.down_bias}
        ours, theirs = (
            moe_experts(*inputs, kernel=name, activation=RELU2, **biases) for name in ("triton", "reference")
        )
        torch.testing.assert_close(ours, theirs, **case.tolerance)


@pytest.mark.parametrize(
    "config", [tile_cost_model.HOPPER[1], tile_cost_model.HOPPER[-2]], ids=lambda config: config.name
)
def test_weights_that_the_copy_engine_cannot_fetch_are_read_by_address(config: Any, device: str) -> None:
    case = Case((3, 0, 18), 37, 33, biases=True, device=device)
    assert_up_agrees(up, config, case)
    assert_down_agrees(down, config, case)


@pytest.mark.parametrize("narrow", ["int8", "fp8"])
@pytest.mark.parametrize("config", tile_cost_model.NARROW[1:3], ids=lambda config: config.name)
def test_weights_of_eight_bits_are_widened_and_scaled(config: Any, narrow: str, device: str) -> None:
    case = Case((3, 0, 18), 208, 144, torch.float16, biases=True, narrow=narrow, device=device)
    assert_up_agrees(up, config, case)
    assert_down_agrees(down, config, case)


@pytest.mark.parametrize("narrow", ["int8", "fp8 rows"])
def test_few_rows_meet_weights_of_eight_bits_by_scales_of_rows(narrow: str, device: str) -> None:
    assert_rows_agree(rows, Case((0, 2, 1), 72, 40, biases=True, narrow=narrow, device=device))


@pytest.mark.parametrize(
    ("width", "hidden"), [(208, 144), (141, 77), pytest.param(640, 520, marks=pytest.mark.thorough)]
)
def test_few_rows_meet_float8_weights_by_scales_of_blocks(width: int, hidden: int, device: str) -> None:
    assert_rows_agree(rows, Case((0, 2, 1), width, hidden, biases=True, narrow="fp8", device=device))


def test_rows_are_rounded_to_eight_bits_by_scales_of_their_own(device: str) -> None:
    case = Case((3, 0, 4), 1168, device=device)
    case.x[2] *= 1e6
    case.x[3] = 0.0
    assert_rounded_alike(rounding, case)


@pytest.mark.parametrize("narrow", ["fp8 rows", "fp8"])
@pytest.mark.parametrize("config", tile_cost_model.EIGHT, ids=lambda config: config.name)
def test_rounded_rows_are_multiplied_with_float8_weights(config: Any, narrow: str, device: str) -> None:
    assert_eight_bits_agree(up, down, config, Case((3, 0, 18, 65), 208, 144, biases=True, narrow=narrow, device=device))


def test_float8_weights_and_rows_that_the_copy_engine_cannot_fetch(device: str) -> None:
    assert_eight_bits_agree(up, down, tile_cost_model.EIGHT[-1], Case((3, 0, 18), 141, 77, narrow="fp8", device=device))


def test_a_layer_in_float8_errs_at_most_as_much_again_as_its_weights_do(device: str) -> None:
    """Of random weights and rows: rounding weights to 4 significant bits errs by 2.6 %, rows by as much, inner rows
    again; errors that know nothing of each other add up by their squares."""
    case = Case((40, 0, 30), 256, 128, device=device)
    exact = reference_layer(case)
    error = {}
    for config in (tile_cost_model.NARROW[2], tile_cost_model.EIGHT[-1]):
        fp8 = Case((40, 0, 30), 256, 128, narrow="fp8", device=device)
        fp8.x, fp8.weight, fp8.expert = case.x, case.weight, case.expert
        for name in ("gate_up", "down"):
            wide, scale = getattr(case, name), torch.full_like(getattr(fp8, f"{name}_scale"), 2.0**-8)
            setattr(fp8, name, (wide / 2.0**-8).to(torch.float8_e4m3fn))
            setattr(fp8, f"{name}_scale", scale)
        ours = kernel.experts(fp8.x, fp8.weight, fp8.expert, fp8.gate_up, fp8.down, gate_up_scale=fp8.gate_up_scale,
                              down_scale=fp8.down_scale, config=config)  # fmt: skip
        error[config.eight] = float((ours - exact).norm() / exact.norm())
    assert 0.02 < error[False] < 0.06
    assert error[False] < error[True] < 1.5 * error[False]


def reference_layer(case: Case) -> Tensor:
    """What a layer of float32 makes of the rows, each with one expert."""
    groups = group(case.expert, len(case.counts), 1)
    inner = reference.up(case.x, groups, 1, case.gate_up)
    return reference.down(inner, groups, case.weight, case.down)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("width", "hidden"), [(72, 40), (37, 33)])
def test_few_rows_agree(width: int, hidden: int, biases: bool, device: str) -> None:
    assert_rows_agree(
        rows, Case((0, 2, 1), width, hidden, activation=CLIPPED if biases else SILU, biases=biases, device=device)
    )


def test_addresses_go_beyond_32_bits(untouched: Any, device: str) -> None:
    apart = 1 << 30
    far = untouched(3 * apart, torch.float16)  # but for the experts' weights
    case = Case((1, 0, 2), dtype=torch.float16, device=device)
    for name in ("gate_up", "down"):
        near = getattr(case, name)
        setattr(case, name, far.as_strided(near.shape, (apart, near.stride(1), 1), len(name)).copy_(near))
        assert_up_agrees(up, tile_cost_model.HOPPER[1], case)
        assert_down_agrees(down, tile_cost_model.HOPPER[1], case)
        assert_rows_agree(rows, case)


def test_tokens_parts_are_summed_in_their_order(device: str) -> None:
    assert_sums_agree(down, device)


@pytest.mark.parametrize("config", [tile_cost_model.ROWS, tile_cost_model.HOPPER[1]], ids=lambda config: config.name)
def test_experts_that_are_elsewhere_add_nothing(config: Any, device: str) -> None:
    case = Case((12, 0, 0), 40, 24, biases=True, device=device)
    expert = torch.randint(-1, 3, (12, 2), dtype=torch.int32, device=device)
    weight = torch.rand(12, 2, device=device)
    biases: dict[str, Any] = {"gate_up_bias_E2F": case.gate_up_bias, "down_bias_ED": case.down_bias}
    ours = kernel.experts(case.x, weight, expert, case.gate_up, case.down, **biases, config=config)
    theirs = experts_reference(case.x, weight, expert, case.gate_up, case.down, **biases)
    assert (expert < 0).any()
    torch.testing.assert_close(ours, theirs, **case.tolerance)


@pytest.mark.parametrize(
    "config",
    [tile_cost_model.ROWS, tile_cost_model.HOPPER[1], tile_cost_model.HOPPER[4]],
    ids=lambda config: config.name,
)
def test_a_layer_agrees(config: Any, device: str) -> None:
    case = Case((2, 1, 0), 40, 24, biases=True, device=device)
    expert = torch.tensor([[2, 0], [0, 1], [1, 2]], dtype=torch.int32, device=device)
    weight, groups = torch.rand(3, 2, device=device), group(expert, 3, 1)
    ours = kernel.experts(case.x, weight, expert, case.gate_up, case.down, gate_up_bias_E2F=case.gate_up_bias,
                          down_bias_ED=case.down_bias, config=config)  # fmt: skip
    inner = reference.up(case.x, groups, 2, case.gate_up, None, case.gate_up_bias)
    theirs = reference.combine(reference.down(inner, groups, weight, case.down, None, case.down_bias), 2)
    torch.testing.assert_close(ours, theirs, **case.tolerance)


def test_experts_asked_of_triton_are_its_own_or_refused(device: str) -> None:
    case = Case((2, 1, 0), 40, 24, device=device)
    inputs = case.x, case.weight, case.expert, case.gate_up, case.down
    ours = moe_experts(*inputs, kernel="triton")
    torch.testing.assert_close(ours, moe_experts(*inputs, kernel="reference"), **case.tolerance)
    alone = moe_experts(*(one[:1] for one in inputs[:3]), *inputs[3:], kernel="triton", invariant=True)
    assert torch.equal(alone, moe_experts(*inputs, kernel="triton", invariant=True)[:1])
    with pytest.raises(KernelInputError, match="invariant results need the Triton kernels"):
        moe_experts(*inputs, kernel="reference", invariant=True)
    with pytest.raises(KernelInputError, match=r"weights are torch\.float16 and activations torch\.float32"):
        moe_experts(*inputs[:3], case.gate_up.half(), case.down.half(), kernel="triton")


def test_weights_kept_in_eight_bits_are_read_by_triton_and_those_packed_for_a_cpu_are_refused(device: str) -> None:
    case = Case((2, 1, 0), 64, 32, device=device)
    up_int8, down_int8 = quantize(case.gate_up, INT8), quantize(case.down, INT8)
    routed = case.x, case.weight, case.expert
    ours = moe_experts(*routed, up_int8, down_int8, kernel="triton")
    torch.testing.assert_close(ours, moe_experts(*routed, up_int8, down_int8, kernel="reference"), **case.tolerance)
    with pytest.raises(KernelInputError, match="its kernels do not read int4 weights"):
        moe_experts(*routed, quantize(case.gate_up, INT4), quantize(case.down, INT4), kernel="triton")


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("config", tile_cost_model.FOUR, ids=lambda config: config.name)
def test_weights_of_four_bits_are_widened_and_scaled(config: Any, name: str, device: str) -> None:
    for activation in (SILU, RELU2):
        case = Case((3, 0, 18), 192, 64, torch.float16, activation, biases=True, device=device)
        assert_four_bits_agree(up, down, name, config, case)


@pytest.mark.parametrize("name", FOUR_BITS)
def test_experts_in_four_bits_are_read_by_triton_where_activations_have_sixteen(name: str, device: str) -> None:
    case = Case((2, 1, 0), 128, 64, torch.float16, device=device)
    narrow = quantize(case.gate_up, FOUR_BITS[name]), quantize(case.down, FOUR_BITS[name])
    routed = case.x, case.weight, case.expert
    ours = moe_experts(*routed, *narrow, kernel="triton")
    torch.testing.assert_close(ours, moe_experts(*routed, *narrow, kernel="reference"), **case.tolerance)
    with pytest.raises(KernelInputError, match=r"activations are torch\.float32, not of 16 bits"):
        moe_experts(case.x.float(), *routed[1:], *narrow, kernel="triton")


INVARIANT = tile_cost_model.candidates(tile_cost_model.Problem(3, 2, 136, 72, 1, invariant=True), H200)


def telling(*shape: int) -> Tensor:
    """Numbers whose products with small whole ones add up exactly within a step of 64, and are rounded from one to the
    next, so that results tell in what steps they were summed, and nothing of the order within one."""
    step = torch.arange(shape[-1]) // 64
    return torch.randint(-8, 9, shape) * 2.0 ** (-8.0 - 17.0 * (step > 0) - step)


def bits(config: tile_cost_model.TileConfig, case: Case, first: int, last: int) -> tuple[Tensor, Tensor]:
    """What both products make of row 25 among the rows `first` … `last`."""
    groups = group(case.expert[first:last], len(case.counts), config.BM)
    inner = up.up(case.x[first:last], groups, 1, case.gate_up, None, None, SILU, config)
    place = int((groups.order_R == 25 - first).nonzero())
    rows = case.inner[first:last][groups.order_R.long()]
    weighted = down.down(rows, groups, case.weight[first:last], case.down, None, None, config)
    return inner[place], weighted[25 - first]


def test_a_row_has_the_same_bits_alone_and_in_any_batch_whatever_tiles_are_chosen(device: str) -> None:
    case = Case((15, 5, 20), 136, 100, device=device)
    case.x, case.inner = telling(40, 136).to(device), telling(40, 100).to(device)
    case.gate_up = torch.randint(-8, 9, (3, 200, 136), device=device).float()
    case.down = torch.randint(-8, 9, (3, 136, 100), device=device).float()
    alone = bits(INVARIANT[0], case, 25, 26)
    for config in INVARIANT:
        for first, last in ((0, 40), (25, 26), (20, 29)):
            for ours, theirs in zip(bits(config, case, first, last), alone, strict=True):
                assert torch.equal(ours, theirs), config.name
    for ours, theirs in zip(bits(tile_cost_model.SINGLE[0], case, 25, 26), alone, strict=True):
        assert not torch.equal(ours, theirs), "shorter steps went unnoticed"

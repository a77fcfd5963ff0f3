"""Quantized weights: the error of rounding, and products equal to those with the dequantized weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_kernels.checks import KernelInputError
from moiety_kernels.cpu.gemm import chunk_of, is_unpacked, product_kind, stored_as
from moiety_kernels.cpu.unpacking import UNPACKED_BYTES
from moiety_kernels.linear import cpu as linear_cpu
from moiety_kernels.linear import linear
from moiety_kernels.moe import SILU, dense_glu, experts
from moiety_kernels.moe import cpu as experts_cpu
from moiety_kernels.moe import reference as experts_reference
from moiety_kernels.quantization import (
    FP8,
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    QuantizedWeight,
    WeightFormat,
    dequantize,
    quantize,
)
from moiety_kernels.quantization.reference import MAGNITUDES, pack, round_to, unpack

WHOLE = [INT8, INT4, WeightFormat("int4", 4, 128)]
OFFSETS = WeightFormat("int4", 4, 64, offsets=True)
SMALL_OFFSETS, WHOLE_OFFSETS = (replace(OFFSETS, group=group) for group in (32, 128))  # as Q4_K, and as AWQ
IN_WORDS = ("arm_pairs", "words")  # ways that multiply numbers of four bits with integers of 16 bits
FORMATS = [*WHOLE, OFFSETS, SMALL_OFFSETS, WHOLE_OFFSETS, FP8, MXFP4, NVFP4]


def is_multiplied_as_it_lies(arithmetic: str, form: WeightFormat) -> bool:
    return not form.is_float8 and (arithmetic == "packed" or (arithmetic in IN_WORDS and not form.floating))


def stands_for(arithmetic: str, weight: QuantizedWeight) -> torch.Tensor:
    """Return the values of a weight that is multiplied as it lies.

    In pairs, numbers of four bits times their scales are rounded, and offsets are not.
    """
    form, plain = weight.format, dequantize(weight)
    if arithmetic != "packed" or form.bits != 4:
        return plain
    if not form.offsets or form.group is None:
        return plain.bfloat16()
    both = weight.scales_NG.unflatten(-1, (-1, 2))
    scales = (both * torch.tensor([1.0, 0.0])).flatten(-2)
    return dequantize(replace(weight, scales_NG=scales)).bfloat16() + both[..., 1].repeat_interleave(form.group, -1)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * shape[-1] ** -0.5


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(WHOLE))
def test_quantizing_dequantized_weights_again_changes_nothing(seed: int, form: WeightFormat) -> None:
    weight = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(seed))
    q, scales = round_to(weight, form)
    again_q, again_scales = round_to(dequantize(QuantizedWeight(pack(q, form), scales, form)), form)
    assert torch.equal(q, again_q)
    torch.testing.assert_close(scales, again_scales, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", WHOLE)
def test_the_error_is_at_most_half_a_step_or_a_little_clipping(form: WeightFormat) -> None:
    weight = drawn(64, 256)
    error = (dequantize(quantize(weight, form)) - weight).norm() / weight.norm()
    assert error < (0.01 if form.bits == 8 else 0.13)
    assert torch.equal(unpack(pack(round_to(weight, form)[0], form), form), round_to(weight, form)[0])


def test_with_offsets_the_least_and_the_greatest_weight_of_a_group_are_kept() -> None:
    weight = drawn(8, 256) + 3
    groups, read = (one.view(8, -1, 64) for one in (weight, dequantize(quantize(weight, OFFSETS))))
    for end in (torch.amin, torch.amax):
        torch.testing.assert_close(end(groups, -1), end(read, -1))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    assert ((read - groups).abs().amax(-1) <= 0.501 * step).all()


def test_rows_of_zeros_and_of_one_value_are_kept() -> None:
    weight = torch.stack([torch.zeros(64), torch.full((64,), 3.0), torch.full((64,), -2.0)])
    for form in (INT8, INT4, FP8):
        torch.testing.assert_close(dequantize(quantize(weight, form)), weight)


def test_a_width_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(KernelInputError, match="a multiple of 32 inputs, not of 40"):
        quantize(torch.ones(2, 40), INT8)


@pytest.mark.parametrize("packed", [32, 64])
def test_mxfp4_is_kept_exactly_and_what_is_not_goes_to_the_nearest_number(packed: int) -> None:
    form = replace(MXFP4, pack=packed)
    generator = torch.Generator().manual_seed(packed)
    numbers = torch.tensor(MAGNITUDES)[torch.randint(0, 8, (3, 5, 4, 32), generator=generator)]
    signs = torch.randint(0, 2, numbers.shape, generator=generator) * 2 - 1
    exact = (numbers * signs * 2.0 ** torch.randint(-60, 60, (3, 5, 4, 1), generator=generator)).flatten(-2)
    assert torch.equal(dequantize(quantize(exact, form)), exact)
    plain = drawn(64, 256)
    narrow = quantize(plain, form)
    near = (narrow.scales_NG.unsqueeze(-1) * torch.tensor(MAGNITUDES)).unsqueeze(2)  # of each group
    nearest = (plain.abs().view(64, 8, 32, 1) - near).abs().amin(-1)
    torch.testing.assert_close((dequantize(narrow) - plain).abs().view(64, 8, 32), nearest)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 17, 120])
@pytest.mark.parametrize(("n", "k"), [(7, 128), (130, 384), (515, 1024)])
def test_a_product_is_that_with_the_weight_it_stands_for(
    arithmetic: str, form: WeightFormat, rows: int, n: int, k: int
) -> None:
    x, weight, bias = drawn(rows, k).bfloat16().float(), quantize(drawn(n, k), form), drawn(n)
    assert linear_cpu.fits(x, weight)
    ours = linear(x, weight, bias)
    if is_multiplied_as_it_lies(arithmetic, form):  # of eight bits nothing is lost to bfloat16
        expected = x.double() @ stands_for(arithmetic, weight).double().T + bias.double()
        worst = float((ours - expected).abs().max() / (expected - bias).abs().max().clamp(min=0.1))
        assert worst < (2e-4 if form.bits == 8 or arithmetic in IN_WORDS else 1e-5)
    else:
        assert torch.equal(ours, linear(x, dequantize(weight).bfloat16(), bias))
    for some in (slice(0, 1), slice(rows // 2, rows // 2 + 3), slice(rows - 1, rows)):
        assert torch.equal(linear(x[some], weight, bias), ours[some]), "a row is alone in every batch"


@pytest.mark.parametrize(
    ("form", "k"),
    [
        (form, k)
        for form in (
            INT8,
            INT4,
            OFFSETS,
            SMALL_OFFSETS,
            WHOLE_OFFSETS,
            MXFP4,
            NVFP4,
            *(WeightFormat("int8", 8, group) for group in (32, 64, 128, 256)),
        )
        for k in (32, 96, 160, 256, 768, 1056)
        if form.takes(k)
    ],
)
def test_any_number_of_groups_and_of_any_size_is_multiplied(arithmetic: str, form: WeightFormat, k: int) -> None:
    x, weight = drawn(9, k).bfloat16().float(), quantize(drawn(6, k) * torch.logspace(-2, 1, k), form)
    as_it_lies = is_multiplied_as_it_lies(arithmetic, form)
    expected = x.double() @ (stands_for(arithmetic, weight) if as_it_lies else dequantize(weight)).double().T
    bound = 2e-2
    if as_it_lies:
        bound = 2e-4 if form.bits == 8 or arithmetic in IN_WORDS else 1e-5
    assert float((linear(x, weight) - expected).abs().max() / expected.abs().max()) < bound


@pytest.mark.parametrize("form", FORMATS)
def test_a_weight_of_many_rows_is_multiplied_in_parts_that_a_thread_has_memory_for(
    arithmetic: str, form: WeightFormat
) -> None:
    x, weight = drawn(16, 1024).bfloat16().float(), quantize(drawn(4096, 1024), form)
    found = linear(x, weight)
    assert torch.equal(found[:, 2048:2560], linear(x, QuantizedWeight(*rows_of(weight, slice(2048, 2560)), form)))
    for wide in (1024, 4096, 14_336, 32_768):
        one = QuantizedWeight(torch.empty(16, wide, dtype=torch.int8), torch.empty(16, 1), replace(form, bits=8))
        for rows in (1, 16, 500):
            for together in (1, 2):
                chunk = chunk_of(product_kind(one), stored_as(one), wide, 8192, rows, 4, together, threads=2)
                assert chunk % 16 == 0 and chunk > 0
                assert not is_unpacked(one) or together * chunk * 2 * wide <= UNPACKED_BYTES


def rows_of(weight: QuantizedWeight, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.values_NK[rows].contiguous(), weight.scales_NG[rows].contiguous()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.usefixtures("arithmetic")
def test_nan_stays_in_its_row_after_quantization(value: float) -> None:
    x, weight = drawn(5, 256), quantize(drawn(8, 256), INT8)
    expected = linear(x, weight)
    x[3, 200] = value
    found = linear(x, weight)
    assert not found[3].isfinite().any()
    assert torch.equal(found[:3], expected[:3])
    assert torch.equal(found[4], expected[4])


@pytest.mark.usefixtures("arithmetic")
def test_rows_of_zeros_and_of_very_small_numbers_come_out_as_zeros() -> None:
    x, weight = torch.zeros(3, 256), quantize(drawn(8, 256), INT8)
    x[1] = 1e-38
    x[2, :128] = 1.0
    found = linear(x, weight)
    assert (found[0] == 0).all()
    assert (found[1].abs() < 1e-30).all()
    assert (found[2] != 0).any()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "top_k", "num", "width", "hidden"), [(1, 2, 4, 128, 256), (9, 3, 8, 128, 128), (70, 2, 5, 256, 384)]
)
def test_experts_are_those_of_the_weights_they_stand_for(
    arithmetic: str, form: WeightFormat, tokens: int, top_k: int, num: int, width: int, hidden: int
) -> None:
    up, down = quantize(drawn(num, 2 * hidden, width), form), quantize(drawn(num, width, hidden), form)
    x, weight = drawn(tokens, width).bfloat16().float(), torch.rand(tokens, top_k)
    expert = torch.stack([torch.randperm(num)[:top_k] for _ in range(tokens)]).int()
    assert experts_cpu.fits(x, expert, up, down, None, None)
    plain = dequantize(up).bfloat16(), dequantize(down).bfloat16()
    ours = experts(x, weight, expert, up, down)
    if not is_multiplied_as_it_lies(arithmetic, form):
        assert torch.equal(ours, experts(x, weight, expert, *plain))
    assert torch.equal(ours[:1], experts(x[:1], weight[:1], expert[:1], up, down)), "a row is alone in every batch"
    reference = experts_reference.experts(x, weight, expert, up, down, activation=SILU)
    torch.testing.assert_close(ours, reference, rtol=0.02, atol=0.02 * float(reference.abs().max()))


@pytest.mark.parametrize("form", FORMATS)
def test_a_dense_feed_forward_takes_them_too(arithmetic: str, form: WeightFormat) -> None:
    up, down, x = quantize(drawn(256, 128), form), quantize(drawn(128, 128), form), drawn(6, 128).bfloat16().float()
    ours, theirs = dense_glu(x, up, down), dense_glu(x, dequantize(up).bfloat16(), dequantize(down).bfloat16())
    if is_multiplied_as_it_lies(arithmetic, form):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))
    else:
        assert torch.equal(ours, theirs)


def every_number(form: WeightFormat) -> torch.Tensor:
    """Return rows of all numbers that a byte can hold, except NaN of float8."""
    numbers = torch.arange(256, dtype=torch.uint8)
    if form.is_float8:
        return numbers.where(numbers & 127 != 127, 0).repeat(3, 2).view(torch.float8_e4m3fn)
    return numbers.repeat(3, 2)


@pytest.mark.parametrize("form", [FP8, replace(FP8, group=128, rows=128), replace(FP8, group=32), MXFP4, NVFP4])
@pytest.mark.usefixtures("arithmetic")
def test_every_floating_number_is_widened_to_what_it_stands_for(form: WeightFormat) -> None:
    values = every_number(form)
    narrow = QuantizedWeight(values, torch.empty(0), form)
    scales = (
        torch.rand(3, form.num_groups(narrow.shape[-1]))
        if form.is_float8
        else torch.full((3, form.num_groups(1024)), 0.25)
    )
    narrow = replace(narrow, scales_NG=scales)
    x = torch.eye(narrow.shape[-1])
    assert linear_cpu.fits(x, narrow)
    assert torch.equal(linear(x, narrow), dequantize(narrow).bfloat16().float().T)


def test_a_last_group_of_float8_may_be_shorter() -> None:
    form = replace(FP8, group=128, rows=128)
    narrow = QuantizedWeight(drawn(7, 352).mul(50).to(torch.float8_e4m3fn), torch.rand(7, 3), form)
    x = drawn(5, 352).bfloat16().float()
    assert linear_cpu.fits(x, narrow)
    assert torch.equal(linear(x, narrow), linear(x, dequantize(narrow).bfloat16()))

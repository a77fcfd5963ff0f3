"""Shards of matrices whose inputs are divided among ranks and sorted by group stand for the inputs of the ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_engine.model.divided_groups import InputShard, shard_of_inputs
from moiety_kernels.linear import linear
from moiety_kernels.quantization import QuantizedWeight, WeightFormat, dequantize
from moiety_kernels.quantization.reference import pack
from moiety_kernels.quantization.weight import BLOCK, GPU_PACK

ROWS = 16


def groups_in_random_order(width: int, group: int, seed: int) -> torch.Tensor:
    return torch.arange(width)[torch.randperm(width, generator=torch.manual_seed(seed))] // group


def weight_of(
    shard: InputShard, numbers_NK: torch.Tensor, scales_NG: torch.Tensor, form: WeightFormat
) -> QuantizedWeight:
    """Return the shard of a matrix with these numbers and scales of all inputs, sorted by group."""
    values = shard.values(numbers_NK, form.half)
    own = replace(shard.format_of(form), pack=form.pack)
    signed = values.view(torch.int8) - form.half if form.bits == 4 else (values ^ form.half).view(torch.int8)
    stored = pack(signed, own) if form.bits == 4 else signed
    return QuantizedWeight(stored, shard.scales(scales_NG, form), own, shard.order_K)


@settings(deadline=None, max_examples=40)
@given(
    group=st.sampled_from([32, 64, 128]),
    num_groups=st.integers(1, 6),
    parts=st.sampled_from([1, 2, 4]),
    bits=st.sampled_from([4, 8]),
    offsets=st.booleans(),
    is_for_gpu=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_shards_of_all_ranks_are_the_matrix(
    group: int, num_groups: int, parts: int, bits: int, offsets: bool, is_for_gpu: bool, seed: int
) -> None:
    width, offsets = group * num_groups, offsets and bits == 4
    form = WeightFormat(f"int{bits}", bits, group, offsets=offsets, ordered=True)
    form = replace(form, pack=GPU_PACK if is_for_gpu and bits == 4 else BLOCK)
    group_of_K = groups_in_random_order(width, group, seed)
    numbers_NK = torch.randint(0, 2**bits, (ROWS, width), dtype=torch.uint8)
    scales_NG = 0.5 + torch.rand(ROWS, form.num_scales(width))
    by_group_K = group_of_K.sort(stable=True).indices
    scale_NK, offset_NK = scales_NG[:, group_of_K], torch.zeros(1)
    if offsets:
        scale_NK, offset_NK = scales_NG[:, ::2][:, group_of_K], scales_NG[:, 1::2][:, group_of_K]
    in_order_NK = torch.empty(ROWS, width)
    in_order_NK[:, by_group_K] = numbers_NK.float() - form.half
    expected_NK, each = in_order_NK * scale_NK + offset_NK, width // parts
    for part in range(parts):
        shard = shard_of_inputs(group_of_K, slice(part * each, (part + 1) * each), form.pack)
        weight = weight_of(shard, numbers_NK, scales_NG, form)
        assert weight.shape == (ROWS, shard.width) and shard.width % form.pack == 0
        torch.testing.assert_close(dequantize(weight), expected_NK[:, part * each : (part + 1) * each])
        if not is_for_gpu:
            x = torch.randn(3, each).bfloat16().float()
            found, wanted = linear(x, weight), x @ dequantize(weight).T
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


def test_inputs_in_order_need_no_further_places() -> None:
    group_of_K = torch.arange(512) // 128
    shard = shard_of_inputs(group_of_K, slice(256, 512), GPU_PACK)
    assert torch.equal(shard.place_K, torch.arange(256, 512))
    assert torch.equal(shard.order_K.long(), torch.arange(256))
    assert shard.group_B.tolist() == [2] * 4 + [3] * 4


@pytest.mark.parametrize(("parts", "most"), [(2, 1.4), (4, 1.7), (8, 2.1)])
def test_a_shard_of_groups_of_128_inputs_has_few_places_without_an_input(parts: int, most: float) -> None:
    width = 8192
    group_of_K, each = groups_in_random_order(width, 128, 0), width // parts
    shards = [shard_of_inputs(group_of_K, slice(i * each, (i + 1) * each), GPU_PACK) for i in range(parts)]
    assert max(one.width for one in shards) < most * each


def test_shards_of_small_groups_for_many_ranks_would_not_save_memory() -> None:
    width, form = 1024, WeightFormat("int4", 4, 32, ordered=True)

    def saves(group: int, parts: int) -> bool:
        shard = shard_of_inputs(groups_in_random_order(width, group, 0), slice(0, width // parts), GPU_PACK)
        return shard.saves_memory(width // parts, replace(form, group=group))

    assert saves(128, 8) and saves(32, 2)
    assert not saves(32, 4)

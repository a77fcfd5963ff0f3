"""Weights that store their inputs in an order of their own give the same products as in the layer's order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from moiety_kernels.checks import KernelInputError
from moiety_kernels.input_order import gather_expert_inputs, gather_inputs
from moiety_kernels.linear import linear
from moiety_kernels.low_rank import Factors, FeedForwardFactors
from moiety_kernels.moe import RELU2, SILU, Activation, dense_glu, experts
from moiety_kernels.moe import cpu as experts_cpu
from moiety_kernels.moe import reference as experts_reference
from moiety_kernels.quantization import INT4, QuantizedWeight, WeightFormat, dequantize, quantize

FORMATS = [WeightFormat("int4", 4, 64, ordered=True), WeightFormat("int4", 4, 32, offsets=True, ordered=True)]
NUM, WIDTH, HIDDEN = 5, 128, 192


def ordered(weight: Tensor, form: WeightFormat) -> QuantizedWeight:
    """Quantize the weight [E, N, K] with its inputs in a random order for each expert."""
    order = torch.stack([torch.randperm(weight.shape[-1]) for _ in weight])
    stored = weight.gather(-1, order.unsqueeze(1).expand_as(weight))
    return replace(quantize(stored, form), order_K=order.int())


def by_hand(x: Tensor, up: QuantizedWeight, down: QuantizedWeight, activation: Activation) -> Tensor:
    """Return one expert's output: rows are gathered before each of the two products."""
    inner = linear(x[:, up.order_K.long()], up.in_stored_order())
    inner = experts_reference.activate(inner, activation)
    return linear(inner[:, down.order_K.long()], down.in_stored_order())


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_an_ordered_weight_stands_for_the_weight_in_the_layers_order() -> None:
    weight = torch.randn(NUM, 48, WIDTH)
    narrow = ordered(weight, FORMATS[0])
    assert narrow.order_K is not None
    for expert in range(NUM):
        stored = dequantize(narrow[expert].in_stored_order())
        assert torch.equal(dequantize(narrow)[expert][:, narrow.order_K[expert].long()], stored)
    assert_close(dequantize(narrow), weight, rtol=0, atol=0.8)
    assert torch.equal(dequantize(narrow[1].unsqueeze(0))[0], dequantize(narrow)[1])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 9, 100])
def test_a_linear_map_gathers_its_inputs(form: WeightFormat, rows: int) -> None:
    weight, bias = ordered(torch.randn(1, 48, WIDTH) / 8, form)[0], torch.randn(48)
    assert weight.order_K is not None
    x = torch.randn(rows, 2 * WIDTH)[:, 3 : WIDTH + 3]
    expected = linear(x[:, weight.order_K.long()].contiguous(), weight.in_stored_order(), bias)
    assert torch.equal(linear(x, weight, bias), expected)
    assert_close(expected, x @ dequantize(weight).T + bias, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gathered_inputs_are_those_of_the_order(dtype: torch.dtype) -> None:
    x, order = torch.randn(20, 70).to(dtype)[:, 5:], torch.randperm(65).int()
    assert torch.equal(gather_inputs(x, order), x[:, order.long()])
    with pytest.raises(KernelInputError, match="order"):
        gather_inputs(x, order[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_places_without_an_input_are_zero(dtype: torch.dtype) -> None:
    x, order = torch.randn(20, 40).to(dtype)[:, 5:], torch.full((64,), -1).int()
    order[torch.randperm(64)[:35]] = torch.randperm(35).int()
    expected = torch.where(order < 0, 0, x[:, order.clamp(min=0).long()])
    assert torch.equal(gather_inputs(x, order), expected)


@pytest.mark.parametrize("activation", [SILU, RELU2], ids=lambda activation: activation.kind)
def test_a_dense_feed_forward_takes_a_padded_shard_of_its_inner_rows(activation: Activation) -> None:
    form, width, hidden = FORMATS[1], WIDTH, 80
    up, down = torch.randn(activation.num_inputs * hidden, WIDTH).bfloat16() / 11, torch.randn(width, 128) / 9
    order = torch.full((128,), -1).int()
    order[torch.randperm(128)[:hidden]] = torch.randperm(hidden).int()
    narrow = replace(quantize(down, form), order_K=order)
    x, onto = torch.randn(5, WIDTH).bfloat16().float(), torch.randn(5, width)
    found = dense_glu(x, up, narrow, activation=activation, onto_TD=onto.clone())
    expected = dense_glu(x, up, dequantize(narrow).bfloat16(), activation=activation, onto_TD=onto)
    assert dequantize(narrow).shape == (width, hidden)
    assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_rows_of_experts_elsewhere_are_gathered_without_an_error() -> None:
    x, order, expert = torch.randn(3, 8), torch.stack([torch.randperm(8) for _ in range(2)]), torch.tensor([1, -1, 0])
    found = gather_expert_inputs(x, order.int(), expert.int())
    assert torch.equal(found, torch.stack([x[0, order[1]], x[1, order[0]], x[2, order[0]]]))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("activation", [SILU, RELU2], ids=lambda activation: activation.kind)
@pytest.mark.parametrize(("of_up", "of_down"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("tokens", [1, 130])
def test_experts_have_orders_of_their_own(
    form: WeightFormat, activation: Activation, of_up: bool, of_down: bool, tokens: int
) -> None:
    up = ordered(torch.randn(NUM, activation.num_inputs * HIDDEN, WIDTH) / 11, form)
    down = ordered(torch.randn(NUM, WIDTH, HIDDEN) / 14, form)
    up, down = (one if is_ordered else identity(one) for one, is_ordered in ((up, of_up), (down, of_down)))
    x, weight = torch.randn(tokens, WIDTH).bfloat16().float(), torch.rand(tokens, 2)
    expert = torch.rand(tokens, NUM).topk(2).indices.int()
    expert[:, 1] = torch.where(expert[:, 1] == 3, -1, expert[:, 1])  # on another rank
    both = (up, of_up), (down, of_down)
    given: list[Any] = [one if is_ordered else one.in_stored_order() for one, is_ordered in both]
    assert experts_cpu.fits(x, expert, *given, None, None)
    each = torch.stack([by_hand(x, up[e], down[e], activation) for e in range(NUM)], dim=1)
    chosen = each.gather(1, expert.clamp(min=0).long().unsqueeze(-1).expand(-1, -1, WIDTH))
    expected = torch.where(expert.unsqueeze(-1) < 0, 0.0, chosen * weight.unsqueeze(-1)).sum(1)
    assert_close(experts(x, weight, expert, *given, activation=activation), expected, rtol=1e-4, atol=1e-4)
    by_reference = experts_reference.experts(x, weight, expert, *given, activation=activation)
    assert_close(by_reference, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    dense = dense_glu(x, given[0][1], given[1][1], activation=activation)
    assert_close(dense, each[:, 1], rtol=1e-4, atol=1e-4)


def identity(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the stored weight with its inputs in the layer's order."""
    assert weight.order_K is not None
    return replace(weight, order_K=torch.arange(weight.shape[-1], dtype=torch.int32).repeat(NUM, 1))


def test_adapters_are_added_to_ordered_weights_in_the_layers_order() -> None:
    form, slots, rank = FORMATS[0], 2, 4
    up, down = ordered(torch.randn(1, 2 * HIDDEN, WIDTH) / 11, form), ordered(torch.randn(1, WIDTH, HIDDEN) / 14, form)
    of_up = Factors(torch.randn(slots, 2 * rank, WIDTH), torch.randn(slots, rank, 2 * HIDDEN) / 9, (HIDDEN, HIDDEN))
    of_down = Factors(torch.randn(slots, rank, HIDDEN), torch.randn(slots, rank, WIDTH) / 9, (WIDTH,))
    factors = FeedForwardFactors(torch.tensor([0, -1, 1, 1]), of_up, of_down)
    x = torch.randn(4, WIDTH).bfloat16().float()
    ours = dense_glu(x, up[0], down[0], adapters=factors)
    plain = dense_glu(x, dequantize(up[0]), dequantize(down[0]), adapters=factors)
    assert_close(ours, plain, rtol=0.02, atol=0.02 * float(plain.abs().max()))
    assert not torch.allclose(ours, dense_glu(x, up[0], down[0]), atol=0.1)


def test_a_weight_whose_order_is_not_contiguous_is_not_taken_as_it_lies() -> None:
    narrow = ordered(torch.randn(2, 48, WIDTH), replace(INT4, ordered=True))
    assert narrow.order_K is not None
    assert not replace(narrow, order_K=narrow.order_K.repeat(1, 2)[:, ::2]).is_contiguous()

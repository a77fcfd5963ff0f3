"""Triton's products of experts whose inputs are in orders of their own agree with the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moiety_kernels.linear import linear
from moiety_kernels.moe import experts
from moiety_kernels.quantization import INT4, QuantizedWeight, dequantize, quantize
from moiety_kernels.quantization.weight import GPU_PACK

FORM = replace(INT4, pack=GPU_PACK, ordered=True)
NUM, WIDTH, HIDDEN = 4, 128, 64


def ordered(weight: Tensor) -> QuantizedWeight:
    order = torch.stack([torch.randperm(weight.shape[-1]) for _ in weight]).int()
    return replace(quantize(weight, FORM), order_K=order.to(weight.device))


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize(("of_up", "of_down"), [(True, True), (True, False), (False, True)])
def test_experts_gather_rows_before_both_products(tokens: int, of_up: bool, of_down: bool, device: str) -> None:
    torch.manual_seed(tokens)
    up = ordered(torch.randn(NUM, 2 * HIDDEN, WIDTH, device=device) / 11)
    down = ordered(torch.randn(NUM, WIDTH, HIDDEN, device=device) / 8)
    up, down = up if of_up else up.in_stored_order(), down if of_down else down.in_stored_order()
    x, weight = torch.randn(tokens, WIDTH, device=device).half(), torch.rand(tokens, 2, device=device)
    expert = torch.rand(tokens, NUM, device=device).topk(2).indices.int()
    expert[:, 1] = torch.where(expert[:, 1] == 2, -1, expert[:, 1])  # on another rank
    ours, theirs = (experts(x, weight, expert, up, down, kernel=name) for name in ("triton", "reference"))
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3 * float(theirs.abs().max()))


def test_a_linear_map_gathers_its_inputs(device: str) -> None:
    weight = ordered(torch.randn(1, 96, WIDTH, device=device) / 11)[0]
    x = torch.randn(5, WIDTH, device=device).half()
    assert weight.order_K is not None
    gathered = linear(x[:, weight.order_K.long()].contiguous(), weight.in_stored_order())
    assert torch.equal(linear(x, weight), gathered)


def test_a_linear_map_takes_a_shard_with_places_for_zeros(device: str) -> None:
    order = torch.full((WIDTH,), -1)
    order[torch.randperm(WIDTH)[:70]] = torch.randperm(70)
    weight = quantize(torch.randn(96, WIDTH, device=device) / 11, FORM)
    weight = replace(weight, order_K=order.int().to(device))
    x = torch.randn(5, 70, device=device).half()
    expected = x.float() @ dequantize(weight).T
    torch.testing.assert_close(linear(x, weight).float(), expected, rtol=5e-3, atol=5e-3 * float(expected.abs().max()))

"""Checks of the kernels for CPUs with weights that store their inputs in an order of their own."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from moiety_kernels.moe import SILU
from moiety_kernels.moe.reference import experts as experts_reference
from moiety_kernels.quantization import INT4, quantize


def gathers(kernel: ModuleType, _: Any) -> None:
    x, order = torch.randn(21, 90)[:, 7:], torch.randperm(83).int()
    assert torch.equal(kernel.gather_inputs(x, order), x[:, order.long()])


def mixes_ordered_experts(kernel: ModuleType) -> None:
    x, weight = torch.randn(90, 64), torch.rand(90, 2)
    expert = torch.rand(90, 4).topk(2).indices.int()
    narrow = []
    for wide in (torch.randn(4, 128, 64) / 8, torch.randn(4, 64, 64) / 8):
        order = torch.stack([torch.randperm(wide.shape[-1]) for _ in wide]).int()
        narrow.append(replace(quantize(wide, replace(INT4, ordered=True)), order_K=order))
    ours = kernel.experts(x, weight, expert, *narrow, SILU, None, None)
    expected = experts_reference(x, weight, expert, *narrow, activation=SILU)
    torch.testing.assert_close(ours, expected, rtol=0.03, atol=0.03 * float(expected.abs().max()))

"""Experts that are loaded in stages, with space for some of them, give the same bits as all at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_kernels.moe import GELU_TANH, SILU, Activation, experts
from moiety_kernels.moe.staged import experts_in_stages
from moiety_kernels.quantization import FORMATS, QuantizedWeight, Weight, quantize
from moiety_kernels.route import RoutingSpec, route

NUM_EXPERTS, TOP_K, ROOM = 9, 3, 4
ROUTING = RoutingSpec(NUM_EXPERTS, TOP_K, renormalize=True)


def emptied(weight: Weight) -> Weight:
    """Room for some experts, which holds nothing of use."""
    if isinstance(weight, QuantizedWeight):
        values, scales = (torch.zeros_like(part[:ROOM]) for part in (weight.values_NK, weight.scales_NG))
        return QuantizedWeight(values, scales.fill_(float("nan")), weight.format)
    return torch.full_like(weight[:ROOM], float("nan"))


def parts(weight: Weight) -> tuple[Tensor, ...]:
    return (weight.values_NK, weight.scales_NG) if isinstance(weight, QuantizedWeight) else (weight,)


def bring(into: list[Weight], whole: list[Weight], expert_TK: Tensor) -> Iterator[Tensor]:
    """A few experts a stage, each in a place that is not its own, where others were before."""
    order = torch.randperm(NUM_EXPERTS).tolist()
    for start in range(0, NUM_EXPERTS, ROOM - 1):
        slot_E = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32)
        for number, expert in enumerate(order[start : start + ROOM - 1]):
            slot_E[expert] = slot = (number + start) % ROOM
            for some, every in zip(into, whole, strict=True):
                for ours, theirs in zip(parts(some), parts(every), strict=True):
                    ours[slot].copy_(theirs[expert])
        yield slot_E[expert_TK.long()]


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("tokens", [1, 5, 130])
@pytest.mark.parametrize(("width", "hidden", "activation"), [(64, 96, SILU), (64, 32, GELU_TANH)])
def test_in_stages_the_bits_are_those_of_all_experts_at_once(
    kept: str, tokens: int, width: int, hidden: int, activation: Activation
) -> None:
    torch.manual_seed(tokens)
    gate_up = torch.randn(NUM_EXPERTS, 2 * hidden, width) * width**-0.5
    down = torch.randn(NUM_EXPERTS, width, hidden) * hidden**-0.5
    whole: list[Any] = [gate_up, down]
    if kept in FORMATS:
        whole = [quantize(weight, FORMATS[kept]) for weight in whole]
    else:
        whole = [weight.to(getattr(torch, kept)) for weight in whole]
    x, choices = torch.randn(tokens, width), route(torch.randn(tokens, NUM_EXPERTS), ROUTING)
    some = [emptied(weight) for weight in whole]
    staged = experts_in_stages(x, choices[0], bring(some, whole, choices[1]), *some, activation=activation)
    assert torch.equal(staged, experts(x, *choices, *whole, activation=activation))


@pytest.mark.parametrize("width", [64, 40])  # torch computes what is of no whole vectors
def test_staged_experts_with_biases_add_nothing_for_experts_outside_the_stages(width: int) -> None:
    torch.manual_seed(0)
    gate_up, down = torch.randn(NUM_EXPERTS, 48, width), torch.randn(NUM_EXPERTS, width, 24)
    biases: dict[str, Any] = {
        "gate_up_bias_E2F": torch.randn(NUM_EXPERTS, 48),
        "down_bias_ED": torch.randn(NUM_EXPERTS, width),
    }
    x, (weight, expert) = torch.randn(7, width), route(torch.randn(7, NUM_EXPERTS), ROUTING)
    here = torch.where(expert < 6, expert, -1)
    stages = [torch.where(here % 2 == odd, here, -1) for odd in (0, 1)]
    staged = experts_in_stages(x, weight, stages, gate_up, down, **biases)
    assert torch.equal(staged, experts(x, weight, here, gate_up, down, **biases))

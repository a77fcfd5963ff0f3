"""Expert weights are copied between slots without a change of their format."""

from __future__ import annotations

import pytest
import torch

from moiety_engine.distribution.layout import RankPosition
from moiety_engine.model.expert_migration import SlotWeights
from moiety_engine.model.weight_offload import named_tensors
from moiety_engine.model.weights import MoeWeights
from moiety_kernels.quantization import FORMATS, quantize
from moiety_kernels.quantization.weight import MXFP4, WeightFormat
from moiety_placement.transition import Write

EXPERTS, HIDDEN, WIDTH = 4, 96, 64
KEPT = [None, *FORMATS.values(), MXFP4]


def draw_weights(form: WeightFormat | None, dtype: torch.dtype) -> MoeWeights:
    torch.manual_seed(0)
    drawn = torch.randn(EXPERTS, 2 * HIDDEN, WIDTH), torch.randn(EXPERTS, WIDTH, HIDDEN)
    gate_up, down = (one.to(dtype) if form is None else quantize(one, form) for one in drawn)
    biases = torch.randn(EXPERTS, 2 * HIDDEN), torch.randn(EXPERTS, WIDTH)
    return MoeWeights(torch.randn(EXPERTS, WIDTH), gate_up, down, None, None, *biases, None)


@pytest.mark.parametrize("form", KEPT, ids=lambda form: "wide" if form is None else form.name)
def test_slots_exchange_all_that_they_hold_in_one_go(form: WeightFormat | None) -> None:
    weights, before = (draw_weights(form, torch.bfloat16) for _ in range(2))
    slots = SlotWeights(weights, EXPERTS, RankPosition())
    transfer = slots.prepare([Write(0, 2, 2), Write(2, 0, 0), Write(3, 2, 2)])
    for (name, now), (_, then) in zip(named_tensors(weights), named_tensors(before), strict=True):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8)), f"{name} has changed before the switch"
    assert not transfer.sends and not transfer.receives and not transfer.num_bytes  # all are on one rank
    slots.fill(transfer.rows_B)
    for (name, now), (_, then) in zip(named_tensors(weights), named_tensors(before), strict=True):
        if name == "router_ED":
            assert torch.equal(now, then)
            continue
        assert torch.equal(now.view(torch.uint8), then[[2, 1, 0, 2]].view(torch.uint8)), name

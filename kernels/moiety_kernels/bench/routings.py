"""Router scores whose best experts follow a known distribution, even or skewed like words. T tokens, E experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moiety_kernels.bench.shapes import LayerShape
from moiety_kernels.route import RoutingSpec

ZIPF_EXPONENT = 1.2


def spec_of(shape: LayerShape) -> RoutingSpec:
    """Return the routing of the layer's model."""
    return RoutingSpec(shape.num_experts, shape.top_k, **shape.routing)


def popularity(name: str, num_experts: int) -> Tensor:
    """Return each expert's share, the most popular first; they sum to one. `name` is one of shapes.ROUTINGS."""
    ranks_E = torch.arange(1, num_experts + 1, dtype=torch.float64)
    share_E = ranks_E ** (-ZIPF_EXPONENT if name == "zipf" else 0.0)
    return share_E / share_E.sum()


def draw_logits(name: str, tokens: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Return float32 scores [T, E] on the CPU whose k best experts are k draws without replacement by popularity.

    This holds for every k: log share + Gumbel noise (Vieira 2014). The popular experts are drawn as well.
    """
    share_E = popularity(name, num_experts)[torch.randperm(num_experts, generator=generator)]
    uniform_TE = torch.rand(tokens, num_experts, generator=generator, dtype=torch.float64).clamp_min(1e-300)
    return (share_E.log() - (-uniform_TE.log()).log()).float()

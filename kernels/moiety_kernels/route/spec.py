"""How a family routes tokens to experts. Knows nothing of how it is computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Scores are a softmax over all experts; the `top_k` best are taken, renormalised to sum to one if so asked."""

    num_experts: int
    top_k: int
    renormalize: bool

"""Dimensions of a model's experts that load counting needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Dimensions of a model's experts.

    `layers`: indices of the layers with experts. `num_experts`: experts of a layer. `top_k`: experts per token.
    `expert_bytes`: bytes of one expert's weights in one layer. `num_groups`: expert groups, of which routing selects a
    few before it chooses a token's experts. `zero_experts`: number of the last experts, which have no weights and are
    on no rank.
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    expert_bytes: int
    num_groups: int = 1
    zero_experts: int = 0

    @property
    def num_placed(self) -> int:
        """Number of experts of a layer that are on some rank."""
        return self.num_experts - self.zero_experts

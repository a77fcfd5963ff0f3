"""What there is to count: the experts of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Which layers have experts, how many, how many of them a token goes to, the bytes of one expert's weights in one
    layer, and the groups of experts a few of which a token's are chosen from."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    expert_bytes: int
    num_groups: int = 1

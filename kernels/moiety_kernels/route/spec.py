"""How a family routes tokens to experts. Knows nothing of how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moiety_kernels.checks import require


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Each token is scored for all experts, and the `top_k` best are taken, with their scores as weights.

    `scoring`:
    - "softmax" over all experts;
    - "sigmoid" of each logit alone (DeepSeek-V3);
    - "softmax_chosen": the logits choose, and the weights are a softmax over those chosen (gpt-oss, Granite);
    - "sparse_mixer" (Liu et al. 2024, PhiMoE), in its form for inference: the two best logits, each weighted by a
      softmax over those logits, without the ones chosen before, that lie within twice `jitter` of it, in relation to
      their own size.

    Group-limited: with `num_groups` > 1 the experts lie in groups of one size, side by side, and only those of the
    `top_groups` best groups may be chosen; a group counts as its best expert (DeepSeek-V2) or the sum of its two best
    (DeepSeek-V3). A bias, where `route` is given one, is added for choosing groups and experts, never to weights.

    Weights are divided by their sum, but never by less than `least_sum`, if `renormalize` says so, and at last
    multiplied by `scale`.
    """

    num_experts: int
    top_k: int
    renormalize: bool
    scoring: Literal["softmax", "sigmoid", "softmax_chosen", "sparse_mixer"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    least_sum: float = 0.0
    scale: float = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        require(0 < self.top_k <= self.num_experts, f"top_k {self.top_k} must be in 1 … {self.num_experts}")
        require(self.scoring != "sparse_mixer" or self.top_k == 2, "the sparse mixer takes the two best experts")
        if self.num_groups > 1:
            require(self.scoring in ("softmax", "sigmoid"), f"{self.scoring} routing knows no groups")
            require(self.num_experts % self.num_groups == 0, "experts must divide into groups of one size")
            require(0 < self.top_groups <= self.num_groups, f"top_groups must be in 1 … {self.num_groups}")
            require(self.top_k <= self.top_groups * self.group_size, "the best groups hold fewer than top_k experts")
            require(self.group_score == "best" or self.group_size > 1, "groups of one expert have no two best")

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.num_experts // self.num_groups

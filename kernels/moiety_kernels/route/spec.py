"""Routing rule of a model family, as data without an implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moiety_kernels.checks import require

Scoring = Literal["softmax", "sigmoid", "sqrt_softplus", "sigmoid_chosen", "softmax_chosen", "sparse_mixer"]
ALL_EXPERT_SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "sqrt_softplus")  # every expert has a score
BIAS_SCORINGS: tuple[Scoring, ...] = (*ALL_EXPERT_SCORINGS, "sigmoid_chosen")  # the choice of experts takes a bias


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Routing rule: score all experts for each token and choose the `top_k` best, with their scores as weights.

    `scoring`:
    - "softmax" over all experts;
    - "sigmoid" of each logit alone (DeepSeek-V3);
    - "sqrt_softplus": the square root of the softplus of each logit alone (DeepSeek-V4);
    - "sigmoid_chosen": the logits choose, and the weights are the sigmoids of the chosen ones (Kolibri);
    - "softmax_chosen": the logits choose, and the weights are a softmax over the chosen ones (gpt-oss, Granite);
    - "sparse_mixer" (Liu et al. 2024, PhiMoE), in its form for inference: the two best logits, each weighted by a
      softmax over the logits, without those chosen before, that lie within twice `jitter` of it, relative to their own
      size.

    Group-limited: with `num_groups` > 1 the experts lie in contiguous groups of one size, and only those of the
    `top_groups` best groups may be chosen; a group's score is its best expert's (DeepSeek-V2) or the sum of its two
    best (DeepSeek-V3). A bias passed to `route` is added for the choice of groups and experts, never to weights.

    If `renormalize` is set, weights are divided by their sum plus `added_sum`, but never by less than `least_sum`. At
    last they are multiplied by `scale`.
    """

    num_experts: int
    top_k: int
    renormalize: bool
    scoring: Scoring = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    least_sum: float = 0.0
    scale: float = 1.0
    jitter: float = 0.0
    added_sum: float = 1e-20  # as in DeepSeek-V3, whose sigmoids may almost vanish

    def __post_init__(self) -> None:
        require(0 < self.top_k <= self.num_experts, f"top_k {self.top_k} must be in 1 … {self.num_experts}")
        require(self.scoring != "sparse_mixer" or self.top_k == 2, "the sparse mixer takes the two best experts")
        if self.num_groups > 1:
            require(self.scoring in ALL_EXPERT_SCORINGS, f"{self.scoring} routing knows no groups")
            require(self.num_experts % self.num_groups == 0, "experts must divide into groups of one size")
            require(0 < self.top_groups <= self.num_groups, f"top_groups must be in 1 … {self.num_groups}")
            require(self.top_k <= self.top_groups * self.group_size, "the best groups hold fewer than top_k experts")
            require(self.group_score == "best" or self.group_size > 1, "groups of one expert have no two best")

    @property
    def group_size(self) -> int:
        """Number of experts in a group."""
        return self.num_experts // self.num_groups

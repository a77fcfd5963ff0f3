"""RMS normalization of all heads together whose heads are divided among ranks (tensor parallelism).

T tokens, C width of this rank's fused queries, keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.spec import AttentionSpec
    from moiety_engine.model.weights import AttentionWeights


class DividedNorm:
    """Normalization of a rank's queries and keys by the squares of all ranks' queries and keys.

    Sums are float64, so that their order, which may depend on the number of rows, does not show in float32.
    """

    def __init__(self, spec: AttentionSpec, weights: AttentionWeights, eps: float, group: RankCollectives) -> None:
        assert spec.divided_norm is not None and weights.q_norm is not None and weights.k_norm is not None
        self._copies = spec.divided_norm.kv_copies
        self._widths = [spec.q_width, spec.kv_width]
        self._weights, self._eps, self._group = [weights.q_norm, weights.k_norm], eps, group
        total_2 = torch.tensor([spec.q_width * group.size, spec.kv_width * group.size / self._copies])
        self._total_2 = total_2.to(weights.q_norm.device, torch.float64)

    def __call__(self, qkv_TC: Tensor) -> None:
        """Normalize the queries and keys in place. All ranks of the group call this together."""
        parts = torch.split(qkv_TC[:, : sum(self._widths)], self._widths, dim=1)
        q_T, k_T = (part.double().square().sum(dim=1) for part in parts)
        mean_T2 = self._group.sum(torch.stack((q_T, k_T / self._copies), dim=1)) / self._total_2
        factor_T2 = torch.rsqrt(mean_T2 + self._eps).float()
        for index, (part, weight) in enumerate(zip(parts, self._weights, strict=True)):
            part.copy_((part.float() * factor_T2[:, index : index + 1]).to(part.dtype) * weight)

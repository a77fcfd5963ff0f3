"""Linear map of each row by the matrix of its own expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.linear import linear
from moiety_kernels.route import group_by_expert

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.quantization import Weight


def routed_linear(x_RD: Tensor, weight_END: Weight, expert_R: Tensor, *, invariant: bool = False) -> Tensor:
    """Return weight[expert] · x for each row, [R, N], in x's dtype.

    `expert_R`: int32 or int64, the index of each row's matrix. `invariant`: as in `linear`.
    """
    num_experts, num_outputs, _ = weight_END.shape
    require_shape("weight", weight_END, (-1, -1, x_RD.shape[-1]))
    require(expert_R.shape == x_RD.shape[:1], "each row has one expert")
    y_RN = x_RD.new_empty(x_RD.shape[0], num_outputs)
    if not x_RD.is_cpu:
        for expert in range(num_experts):
            ours_RN = linear(x_RD, weight_END[expert], invariant=invariant)
            y_RN = torch.where((expert_R == expert).unsqueeze(1), ours_RN, y_RN)
        return y_RN
    order_R, counts_E = group_by_expert(expert_R, num_experts)
    for expert, rows in enumerate(torch.split(order_R, counts_E.tolist())):
        if len(rows):
            ours = linear(x_RD.index_select(0, rows), weight_END[expert], invariant=invariant)
            y_RN.index_copy_(0, rows, ours)
    return y_RN

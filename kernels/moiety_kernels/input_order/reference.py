"""Definition of the gather of inputs. T tokens, R rows, K inputs, E experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def gather_inputs(x_TK: Tensor, order_K: Tensor) -> Tensor:
    """Return x[:, order], with zeros where the order is -1; it is longer than a row then."""
    width = x_TK.shape[1]
    if len(order_K) == width:
        return x_TK.index_select(1, order_K)
    return torch.cat((x_TK, x_TK.new_zeros(len(x_TK), 1)), dim=1).index_select(1, order_K.remainder(width + 1))


def gather_expert_inputs(x_RK: Tensor, order_EK: Tensor, expert_R: Tensor) -> Tensor:
    """Return each row in the order of its expert; rows of a negative expert in that of the first one."""
    return x_RK.gather(1, order_EK[expert_R.clamp(min=0).long()].long())

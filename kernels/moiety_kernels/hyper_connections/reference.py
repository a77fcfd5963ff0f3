"""Definition of hyper-connections (Xie et al. 2026). T tokens, N streams, D model width, C projections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def mixture_weights(
    logits_TC: Tensor, scale: Tensor, base_C: Tensor, num_streams: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (pre_TN, post_TN, comb_TNN), or pre_TN alone if the logits have its columns only."""
    n = num_streams
    pre_TN = torch.sigmoid(logits_TC[:, :n] * scale[0] + base_C[:n]) + eps
    if logits_TC.shape[1] == n:
        return pre_TN, None, None
    post_TN = 2 * torch.sigmoid(logits_TC[:, n : 2 * n] * scale[1] + base_C[n : 2 * n])
    comb_TNN = (logits_TC[:, 2 * n :] * scale[2] + base_C[2 * n :]).view(-1, n, n)
    comb_TNN = comb_TNN.softmax(dim=2) + eps
    comb_TNN = comb_TNN / (comb_TNN.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb_TNN = comb_TNN / (comb_TNN.sum(dim=2, keepdim=True) + eps)
        comb_TNN = comb_TNN / (comb_TNN.sum(dim=1, keepdim=True) + eps)
    return pre_TN, post_TN, comb_TNN


def collapse_streams(streams_TND: Tensor, pre_TN: Tensor) -> Tensor:
    """Return x_TD, the mixture of the streams."""
    return (pre_TN.unsqueeze(2) * streams_TND).sum(dim=1).to(streams_TND.dtype)


def expand_streams(streams_TND: Tensor, output_TD: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """Return the streams with the output of half a layer."""
    mixed_TND = comb_TNN.mT @ streams_TND.float()
    return (post_TN.unsqueeze(2) * output_TD.unsqueeze(1) + mixed_TND).to(streams_TND.dtype)

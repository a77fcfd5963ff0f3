"""LoRA products added to those of a linear map: each row uses its own adapter, many adapters at once.

T tokens, K pairs per token, S slots of adapters, E experts, P parts of an output with separate factors, r rank, D input
and N output width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.low_rank import reference
from moiety_kernels.low_rank.factors import Factors, FeedForwardFactors

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Factors", "FeedForwardFactors", "add_low_rank"]

_cpu = lazy_import(__name__, "cpu")


def add_low_rank(out_TN: Tensor, x_TD: Tensor, factors: Factors, slot_T: Tensor) -> None:
    """Add out[t] += up[slot[t]] · down[slot[t]] · x[t] for the tokens with a slot; a negative slot means no adapter.

    `slot_T` is int64. On a CPU a token's bits do not depend on the other tokens.
    """
    down_SRD, up_SrN, widths = factors.down_SRD, factors.up_SrN, factors.widths
    tokens, num_slots = x_TD.shape[0], down_SRD.shape[0]
    require_shape("down", down_SRD, (-1, len(widths) * up_SrN.shape[1], x_TD.shape[1]))
    require_shape("up", up_SrN, (num_slots, -1, sum(widths)))
    require_shape("out", out_TN, (tokens, sum(widths)))
    require_shape("slot", slot_T, (tokens,))
    require(out_TN.dtype == x_TD.dtype == down_SRD.dtype == up_SrN.dtype, "all must have one dtype")
    if x_TD.is_cpu and _cpu().fits(x_TD, out_TN, factors, slot_T):
        _cpu().add(out_TN, x_TD, factors, slot_T)
    else:
        reference.add(out_TN, x_TD, factors, slot_T)

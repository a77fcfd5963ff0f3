"""Definition of the causal depthwise convolution.

T tokens, C channels, W taps, w = W - 1, N slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.causal_conv.weights import CausalConvWeights
    from moiety_kernels.recurrent.inputs import RecurrentSequences


def causal_conv(x_TC: Tensor, weights: CausalConvWeights, tail_NwC: Tensor, sequences: RecurrentSequences) -> Tensor:
    """Return out_TC in x's dtype, computed in float32, and replace the tails."""
    taps = weights.weight_WC.shape[0]
    out_TC = torch.empty_like(x_TC)
    for begin, end, slot, has_state in sequences.spans():
        before = tail_NwC[slot] if has_state else torch.zeros_like(tail_NwC[slot])
        rows = torch.cat((before.to(x_TC.dtype), x_TC[begin:end]))
        windows_WTC = torch.stack([rows[tap : tap + end - begin] for tap in range(taps)])
        sums_TC = (windows_WTC.float() * weights.weight_WC.float()[:, None]).sum(0)
        if weights.bias_C is not None:
            sums_TC = sums_TC + weights.bias_C.float()
        out_TC[begin:end] = (silu(sums_TC) if weights.silu else sums_TC).to(x_TC.dtype)
        tail_NwC[slot] = rows[1 - taps :].to(tail_NwC.dtype)
    return out_TC

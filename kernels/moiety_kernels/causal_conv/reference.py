"""Definition of the causal depthwise convolution.

T tokens, C channels, W taps, w = W - 1, N slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu as silu_of

if TYPE_CHECKING:
    from torch import Tensor


def causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    tail_NwC: Tensor,
    slot_S: Tensor,
    has_state_S: Tensor,
    query_start_S1: Tensor,
    *,
    silu: bool,
) -> Tensor:
    """Return out_TC in x's dtype, computed in float32, and replace the tails."""
    taps = weight_WC.shape[0]
    out_TC = torch.empty_like(x_TC)
    starts, slots = query_start_S1.tolist(), slot_S.tolist()
    for s, has_state in enumerate(has_state_S.tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        before = tail_NwC[slots[s]] if has_state else torch.zeros_like(tail_NwC[slots[s]])
        rows = torch.cat((before.to(x_TC.dtype), x_TC[begin:end]))
        windows_WTC = torch.stack([rows[tap : tap + end - begin] for tap in range(taps)])
        sums_TC = (windows_WTC.float() * weight_WC.float()[:, None]).sum(0)
        if bias_C is not None:
            sums_TC = sums_TC + bias_C.float()
        out_TC[begin:end] = (silu_of(sums_TC) if silu else sums_TC).to(x_TC.dtype)
        tail_NwC[slots[s]] = rows[1 - taps :].to(tail_NwC.dtype)
    return out_TC

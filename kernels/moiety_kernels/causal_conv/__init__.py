"""Causal depthwise convolution over each sequence's tokens, with a cached tail of its last inputs (short convolution).

Recurrent layers mix neighbouring tokens with it before their recurrence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.causal_conv import reference
from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import when_asked

if TYPE_CHECKING:
    from torch import Tensor

_cpu = when_asked(__name__, "cpu")
_kernel = when_asked(__name__, "kernel")


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
    max_query: int,
) -> Tensor:
    """Return out_TC, out[t] = Σ_i weight[i] · x[t - W + 1 + i] + bias, then SiLU if `silu`.

    Tokens before a sequence's first one are the rows of its tail, or zeros where `has_state_S` is 0. The tail of each
    sequence, its last w = W - 1 inputs with the newest one last, is in row `slot_S` of `tail_NwC`, and is replaced.
    Sequence s has the tokens query_start[s] ≤ t < query_start[s + 1]; `max_query` is the largest number of them.
    `slot_S` is int64, `has_state_S` and `query_start_S1` are int32. No two sequences have one slot. On a CPU a token's
    bits depend neither on other sequences nor on how its sequence is cut into chunks.
    """
    taps, channels, sequences = weight_WC.shape[0], x_TC.shape[1], slot_S.shape[0]
    require(taps > 1, "the convolution must have two taps or more")
    require_shape("weight", weight_WC, (taps, channels))
    require_shape("tail", tail_NwC, (-1, taps - 1, channels))
    require_shape("query_start", query_start_S1, (sequences + 1,))
    require_shape("has_state", has_state_S, (sequences,))
    require(slot_S.dtype is torch.int64, "slot must be int64")
    sequences_of = slot_S, has_state_S, query_start_S1
    if x_TC.is_cpu and _cpu().fits(x_TC, weight_WC, bias_C, tail_NwC, *sequences_of):
        fast: Tensor = _cpu().causal_conv(x_TC, weight_WC, bias_C, tail_NwC, *sequences_of, silu=silu)
        return fast
    if x_TC.is_cuda and _kernel().fits(x_TC, tail_NwC):
        on_gpu: Tensor = _kernel().causal_conv(
            x_TC, weight_WC, bias_C, tail_NwC, *sequences_of, silu=silu, max_query=max_query
        )
        return on_gpu
    return reference.causal_conv(x_TC, weight_WC, bias_C, tail_NwC, *sequences_of, silu=silu)

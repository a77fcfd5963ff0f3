"""The gated delta rule: linear attention whose state forgets by a gate and corrects what it recalls.

Gated DeltaNet (2412.06464) has one gate a head, Kimi Delta Attention (2510.26692) one a channel of the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.gated_delta import reference
from moiety_kernels.lazy_imports import when_asked

if TYPE_CHECKING:
    from torch import Tensor

_cpu = when_asked(__name__, "cpu")
_kernel = when_asked(__name__, "kernel")


def gated_delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TMV: Tensor,
    log_decay_TMG: Tensor,
    beta_TM: Tensor,
    state_NMKV: Tensor,
    slot_S: Tensor,
    has_state_S: Tensor,
    query_start_S1: Tensor,
    *,
    num_decode: int = 0,
    max_query: int,
) -> Tensor:
    """Return out_TMV, and replace the states: S ← e^g · S + k ⊗ β (v - (e^g · S)ᵀ k), out = Sᵀ q, token by token.

    Queries and keys are divided by their lengths first, and queries by √K; value heads m of one group read key head
    m · H / M. `log_decay_TMG` g ≤ 0 is float32 with G = 1 for a gate a head or G = K for a gate a channel, `beta_TM` is
    float32. The state of a sequence is in row `slot_S` of `state_NMKV`, float32; where `has_state_S` is 0 it begins as
    zeros. Sequence s has the tokens query_start[s] ≤ t < query_start[s + 1]: the first `num_decode` sequences have one
    each, and no sequence more than `max_query`. `slot_S` is int64, `has_state_S` and `query_start_S1` are int32. No two
    sequences have one slot. On a CPU a token's bits depend neither on other sequences nor on how its sequence is cut
    into chunks.
    """
    tokens, heads, width = k_THK.shape
    value_heads, value_width = v_TMV.shape[1:]
    require_shape("q", q_THK, (tokens, heads, width))
    require_shape("v", v_TMV, (tokens, -1, -1))
    require(value_heads % heads == 0, "the value heads must be a multiple of the key heads")
    require_shape("log_decay", log_decay_TMG, (tokens, value_heads, -1))
    require(log_decay_TMG.shape[2] in (1, width), "log_decay must have one entry a head, or one a channel of the key")
    require_shape("beta", beta_TM, (tokens, value_heads))
    require_shape("state", state_NMKV, (-1, value_heads, width, value_width))
    require_shape("query_start", query_start_S1, (slot_S.shape[0] + 1,))
    require_shape("has_state", has_state_S, (slot_S.shape[0],))
    require(
        log_decay_TMG.dtype is beta_TM.dtype is state_NMKV.dtype is torch.float32,
        "log_decay, beta and state must be float32",
    )
    args = q_THK, k_THK, v_TMV, log_decay_TMG, beta_TM, state_NMKV, slot_S, has_state_S, query_start_S1
    if v_TMV.is_cpu and _cpu().fits(*args):
        fast: Tensor = _cpu().gated_delta_rule(*args)
        return fast
    if v_TMV.is_cuda and _kernel().fits(q_THK, k_THK, v_TMV, log_decay_TMG, state_NMKV):
        on_gpu: Tensor = _kernel().gated_delta_rule(*args, num_decode=num_decode, max_query=max_query)
        return on_gpu
    return reference.gated_delta_rule(*args)

"""Linear attention with a decaying state: Mamba-2 (2405.21060) and lightning attention (2401.04658)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import when_asked
from moiety_kernels.linear_attention import reference

if TYPE_CHECKING:
    from torch import Tensor

_cpu = when_asked(__name__, "cpu")
_kernel = when_asked(__name__, "kernel")


def linear_attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TMV: Tensor,
    log_decay_TM: Tensor,
    state_NMKV: Tensor,
    slot_S: Tensor,
    has_state_S: Tensor,
    query_start_S1: Tensor,
    *,
    num_decode: int = 0,
    max_query: int,
) -> Tensor:
    """Return out_TMV, and replace the states: S ← e^g · S + k ⊗ v, out = Sᵀ q, token by token.

    Value heads m of one group read key head m · H / M. `log_decay_TM` g ≤ 0 is float32. The state of a sequence is in
    row `slot_S` of `state_NMKV`, float32; where `has_state_S` is 0 it begins as zeros. Sequences and bits are as in
    `gated_delta_rule`. Mamba-2 has C as queries, B as keys, Δt · x as values and Δt · A as gates.
    """
    tokens, heads, width = k_THK.shape
    value_heads, value_width = v_TMV.shape[1:]
    require_shape("q", q_THK, (tokens, heads, width))
    require_shape("v", v_TMV, (tokens, -1, -1))
    require(value_heads % heads == 0, "the value heads must be a multiple of the key heads")
    require_shape("log_decay", log_decay_TM, (tokens, value_heads))
    require_shape("state", state_NMKV, (-1, value_heads, width, value_width))
    require_shape("query_start", query_start_S1, (slot_S.shape[0] + 1,))
    require_shape("has_state", has_state_S, (slot_S.shape[0],))
    require(log_decay_TM.dtype is state_NMKV.dtype is torch.float32, "log_decay and state must be float32")
    args = q_THK, k_THK, v_TMV, log_decay_TM, state_NMKV, slot_S, has_state_S, query_start_S1
    if v_TMV.is_cpu and _cpu().fits(*args):
        fast: Tensor = _cpu().linear_attention(*args)
        return fast
    if v_TMV.is_cuda and _kernel().fits(q_THK, k_THK, v_TMV, log_decay_TM, state_NMKV):
        on_gpu: Tensor = _kernel().linear_attention(*args, num_decode=num_decode, max_query=max_query)
        return on_gpu
    return reference.linear_attention(*args)

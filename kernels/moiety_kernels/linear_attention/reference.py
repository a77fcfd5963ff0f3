"""Definition of linear attention with a decaying state, token by token, in float32.

T tokens, H key heads of width K, M value heads of width V, N slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def linear_attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TMV: Tensor,
    log_decay_TM: Tensor,
    state_NMKV: Tensor,
    slot_S: Tensor,
    has_state_S: Tensor,
    query_start_S1: Tensor,
) -> Tensor:
    """Return out_TMV in v's dtype, and replace the states."""
    sharing = v_TMV.shape[1] // k_THK.shape[1]
    q_TMK, k_TMK = (one.float().repeat_interleave(sharing, dim=1) for one in (q_THK, k_THK))
    decay_TM11, out_TMV = log_decay_TM.exp()[..., None, None], torch.empty_like(v_TMV)
    starts, slots = query_start_S1.tolist(), slot_S.tolist()
    for s, has_state in enumerate(has_state_S.tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        state_MKV = state_NMKV[slots[s]].clone() if has_state else torch.zeros_like(state_NMKV[slots[s]])
        for t in range(begin, end):
            state_MKV = state_MKV * decay_TM11[t] + k_TMK[t, :, :, None] * v_TMV[t, :, None].float()
            out_TMV[t] = torch.einsum("mkv,mk->mv", state_MKV, q_TMK[t]).to(v_TMV.dtype)
        state_NMKV[slots[s]] = state_MKV
    return out_TMV

"""Definition of the gated delta rule, token by token, in float32.

T tokens, H key heads of width K, M value heads of width V, G gates a value head, N slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-6  # added to the squared length of a query or a key


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
) -> Tensor:
    """Return out_TMV in v's dtype, and replace the states."""
    sharing = v_TMV.shape[1] // k_THK.shape[1]
    q_TMK = unit(q_THK).repeat_interleave(sharing, dim=1) * q_THK.shape[2] ** -0.5
    k_TMK = unit(k_THK).repeat_interleave(sharing, dim=1)
    decay_TMG1, out_TMV = log_decay_TMG.exp().unsqueeze(3), torch.empty_like(v_TMV)
    starts, slots = query_start_S1.tolist(), slot_S.tolist()
    for s, has_state in enumerate(has_state_S.tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        state_MKV = state_NMKV[slots[s]].clone() if has_state else torch.zeros_like(state_NMKV[slots[s]])
        for t in range(begin, end):
            state_MKV = state_MKV * decay_TMG1[t]
            recalled_MV = torch.einsum("mkv,mk->mv", state_MKV, k_TMK[t])
            change_MV = (v_TMV[t].float() - recalled_MV) * beta_TM[t, :, None]
            state_MKV = state_MKV + k_TMK[t, :, :, None] * change_MV[:, None]
            out_TMV[t] = torch.einsum("mkv,mk->mv", state_MKV, q_TMK[t]).to(v_TMV.dtype)
        state_NMKV[slots[s]] = state_MKV
    return out_TMV


def unit(x_THK: Tensor) -> Tensor:
    """Return the vectors divided by their lengths, float32."""
    x_THK = x_THK.float()
    return x_THK * torch.rsqrt(x_THK.square().sum(dim=-1, keepdim=True) + EPS)

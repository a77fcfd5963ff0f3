"""Definition of the gated delta rule, token by token, in float32.

T tokens, H key heads of width K, M value heads of width V, G gates a value head, N slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import softplus

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences

EPS = 1e-6  # added to the squared length of a query or a key


def gated_delta_rule(
    heads: RecurrentHeads, log_decay_TMG: Tensor, beta_TM: Tensor, state_NMKV: Tensor, sequences: RecurrentSequences
) -> Tensor:
    """Return out_TMV in v's dtype, and replace the states."""
    q_THK, v_TMV = heads.q_THK, heads.v_TMV
    q_TMK = unit(q_THK).repeat_interleave(heads.sharing, dim=1) * q_THK.shape[2] ** -0.5
    k_TMK = unit(heads.k_THK).repeat_interleave(heads.sharing, dim=1)
    decay_TMG1, out_TMV = log_decay_TMG.exp().unsqueeze(3), torch.empty_like(v_TMV)
    for begin, end, slot, has_state in sequences.spans():
        state_MKV = state_NMKV[slot].clone() if has_state else torch.zeros_like(state_NMKV[slot])
        for t in range(begin, end):
            state_MKV = state_MKV * decay_TMG1[t]
            recalled_MV = torch.einsum("mkv,mk->mv", state_MKV, k_TMK[t])
            change_MV = (v_TMV[t].float() - recalled_MV) * beta_TM[t, :, None]
            state_MKV = state_MKV + k_TMK[t, :, :, None] * change_MV[:, None]
            out_TMV[t] = torch.einsum("mkv,mk->mv", state_MKV, q_TMK[t]).to(v_TMV.dtype)
        state_NMKV[slot] = state_MKV
    return out_TMV


def unit(x_THK: Tensor) -> Tensor:
    """Return the vectors divided by their lengths, float32."""
    x_THK = x_THK.float()
    return x_THK * torch.rsqrt(x_THK.square().sum(dim=-1, keepdim=True) + EPS)


def delta_gates(strength_decay_TG: Tensor, decay_M: Tensor, decay_bias_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return log_decay_TM and beta_TM, float32."""
    strength_TM, decay_TM = strength_decay_TG.float().chunk(2, dim=1)
    return -decay_M.exp() * softplus(decay_TM + decay_bias_M), strength_TM.sigmoid()

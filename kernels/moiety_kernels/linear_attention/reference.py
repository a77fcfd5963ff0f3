"""Definition of linear attention with a decaying state, token by token, in float32.

T tokens, H key heads of width K, M value heads of width V, N slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences


def linear_attention(
    heads: RecurrentHeads, log_decay_TM: Tensor, state_NMKV: Tensor, sequences: RecurrentSequences
) -> Tensor:
    """Return out_TMV in v's dtype, and replace the states."""
    q_TMK, k_TMK = (one.float().repeat_interleave(heads.sharing, dim=1) for one in (heads.q_THK, heads.k_THK))
    v_TMV = heads.v_TMV
    decay_TM11, out_TMV = log_decay_TM.exp()[..., None, None], torch.empty_like(v_TMV)
    for begin, end, slot, has_state in sequences.spans():
        state_MKV = state_NMKV[slot].clone() if has_state else torch.zeros_like(state_NMKV[slot])
        for t in range(begin, end):
            state_MKV = state_MKV * decay_TM11[t] + k_TMK[t, :, :, None] * v_TMV[t, :, None].float()
            out_TMV[t] = torch.einsum("mkv,mk->mv", state_MKV, q_TMK[t]).to(v_TMV.dtype)
        state_NMKV[slot] = state_MKV
    return out_TMV

"""Definition of linear attention with a decaying state, token by token, in float32.

A decay near 1 has few significant bits in float32, and rounding the product of a state with it is not neutral. So the
state is multiplied by e^g - 1, and that product, which is small, is added to it together with the new entry.

T tokens, H key heads of width K, M value heads of width V, N slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences

_NEAR_ONE = -0.5  # gates above it have a decay near 1


def linear_attention(
    heads: RecurrentHeads, log_decay_TM: Tensor, state_NMKV: Tensor, sequences: RecurrentSequences
) -> Tensor:
    """Return out_TMV in v's dtype, and replace the states."""
    q_TMK, k_TMK = (one.float().repeat_interleave(heads.sharing, dim=1) for one in (heads.q_THK, heads.k_THK))
    v_TMV = heads.v_TMV
    near_one_TM, out_TMV = log_decay_TM > _NEAR_ONE, torch.empty_like(v_TMV)
    added_TM = torch.where(near_one_TM, log_decay_TM.expm1(), log_decay_TM.exp())
    kept_TM11, added_TM11 = near_one_TM.float()[..., None, None], added_TM[..., None, None]
    for begin, end, slot, has_state in sequences.spans():
        state_MKV = state_NMKV[slot].clone() if has_state else torch.zeros_like(state_NMKV[slot])
        for t in range(begin, end):
            entry_MKV = k_TMK[t, :, :, None] * v_TMV[t, :, None].float()
            state_MKV = kept_TM11[t] * state_MKV + (added_TM11[t] * state_MKV + entry_MKV)
            out_TMV[t] = torch.einsum("mkv,mk->mv", state_MKV, q_TMK[t]).to(v_TMV.dtype)
        state_NMKV[slot] = state_MKV
    return out_TMV

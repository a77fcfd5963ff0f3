"""Linear attention with a decaying state: Mamba-2 (2405.21060) and lightning attention (2401.04658)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.linear_attention import reference

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences

_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def linear_attention(
    heads: RecurrentHeads, log_decay_TM: Tensor, state_NMKV: Tensor, sequences: RecurrentSequences
) -> Tensor:
    """Return out_TMV, and replace the states: S ← e^g · S + k ⊗ v, out = Sᵀ q, token by token.

    `log_decay_TM` g ≤ 0 and the states are float32. The bits of a token are as in `gated_delta_rule`. Mamba-2 has C as
    queries, B as keys, Δt · x as values and Δt · A as gates.
    """
    heads.check(state_NMKV)
    require_shape("log_decay", log_decay_TM, tuple(heads.v_TMV.shape[:2]))
    require(log_decay_TM.dtype is state_NMKV.dtype is torch.float32, "log_decay and state must be float32")
    args = heads, log_decay_TM, state_NMKV, sequences
    if state_NMKV.is_cpu and _cpu().fits(*args):
        fast: Tensor = _cpu().linear_attention(*args)
        return fast
    if state_NMKV.is_cuda and _kernel().fits(heads, log_decay_TM, state_NMKV):
        on_gpu: Tensor = _kernel().linear_attention(*args)
        return on_gpu
    return reference.linear_attention(*args)

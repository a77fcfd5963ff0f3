"""The gated delta rule: linear attention whose state forgets by a gate and corrects what it recalls.

Gated DeltaNet (2412.06464) has one gate a head, Kimi Delta Attention (2510.26692) one a channel of the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.gated_delta import reference
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences

_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def delta_gates(strength_decay_TG: Tensor, decay_M: Tensor, decay_bias_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's gates (log_decay_TM, beta_TM), float32, from its projections b and a of the tokens.

    `strength_decay_TG` has b of all M heads, then a. log_decay = -e^decay · softplus(a + decay_bias), and
    beta = sigmoid(b).
    """
    require_shape("strength_decay", strength_decay_TG, (-1, 2 * decay_M.shape[0]))
    if strength_decay_TG.is_cpu and _cpu().fits_gates(strength_decay_TG):
        fast: tuple[Tensor, Tensor] = _cpu().delta_gates(strength_decay_TG, decay_M, decay_bias_M)
        return fast
    return reference.delta_gates(strength_decay_TG, decay_M, decay_bias_M)


def gated_delta_rule(
    heads: RecurrentHeads, log_decay_TMG: Tensor, beta_TM: Tensor, state_NMKV: Tensor, sequences: RecurrentSequences
) -> Tensor:
    """Return out_TMV, and replace the states: S ← e^g · S + k ⊗ β (v - (e^g · S)ᵀ k), out = Sᵀ q, token by token.

    Queries and keys are divided by their lengths first, and queries by √K. `log_decay_TMG` g ≤ 0 is float32 with G = 1
    for a gate a head or G = K for a gate a channel; `beta_TM` and the states are float32. On a CPU a token's bits
    depend neither on other sequences nor on how its sequence is cut into chunks.
    """
    heads.check(state_NMKV)
    tokens, value_heads, width = *heads.v_TMV.shape[:2], heads.k_THK.shape[2]
    require_shape("log_decay", log_decay_TMG, (tokens, value_heads, -1))
    require(log_decay_TMG.shape[2] in (1, width), "log_decay must have one entry a head, or one a channel of the key")
    require_shape("beta", beta_TM, (tokens, value_heads))
    require(
        log_decay_TMG.dtype is beta_TM.dtype is state_NMKV.dtype is torch.float32,
        "log_decay, beta and state must be float32",
    )
    args = heads, log_decay_TMG, beta_TM, state_NMKV, sequences
    if state_NMKV.is_cpu and _cpu().fits(*args):
        fast: Tensor = _cpu().gated_delta_rule(*args)
        return fast
    if state_NMKV.is_cuda and _kernel().fits(heads, log_decay_TMG, state_NMKV):
        on_gpu: Tensor = _kernel().gated_delta_rule(*args)
        return on_gpu
    return reference.gated_delta_rule(*args)

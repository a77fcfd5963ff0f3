"""Causal depthwise convolution over each sequence's tokens, with a cached tail of its last inputs (short convolution).

Recurrent layers mix neighbouring tokens with it before their recurrence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.causal_conv import reference
from moiety_kernels.causal_conv.weights import CausalConvWeights
from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentSequences

__all__ = ["CausalConvWeights", "causal_conv"]

_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def causal_conv(x_TC: Tensor, weights: CausalConvWeights, tail_NwC: Tensor, sequences: RecurrentSequences) -> Tensor:
    """Return out_TC, out[t] = Σ_i weight[i] · x[t - W + 1 + i] + bias, then SiLU if `weights.silu`.

    Tokens before a sequence's first one are the rows of its tail, or zeros without a state. The tail of a sequence, its
    last w = W - 1 inputs with the newest one last, is replaced. On a CPU a token's bits depend neither on other
    sequences nor on how its sequence is cut into chunks.
    """
    weight_WC = weights.weight_WC
    taps, channels = weight_WC.shape[0], x_TC.shape[1]
    require(taps > 1, "the convolution must have two taps or more")
    require_shape("weight", weight_WC, (taps, channels))
    require_shape("tail", tail_NwC, (-1, taps - 1, channels))
    args = x_TC, weights, tail_NwC, sequences
    if x_TC.is_cpu and _cpu().fits(*args):
        fast: Tensor = _cpu().causal_conv(*args)
        return fast
    if x_TC.is_cuda and _kernel().fits(x_TC, tail_NwC):
        on_gpu: Tensor = _kernel().causal_conv(*args)
        return on_gpu
    return reference.causal_conv(*args)

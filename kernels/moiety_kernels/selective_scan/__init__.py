"""Selective scan: the recurrence of Mamba (2312.00752), whose state has one decay per channel and row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.selective_scan import reference

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentSequences

_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def selective_scan(
    x_TC: Tensor,
    step_TC: Tensor,
    gate_TC: Tensor,
    write_TN: Tensor,
    read_TN: Tensor,
    rate_NC: Tensor,
    step_bias_C: Tensor,
    skip_C: Tensor,
    state_LNC: Tensor,
    sequences: RecurrentSequences,
) -> Tensor:
    """Return out_TC, and replace the states: S ← e^(Δ · rate) · S + write ⊗ (Δ · x), token by token.

    Δ = softplus(step + step_bias), and out = (Sᵀ read + skip · x) · silu(gate). `rate_NC` < 0, `step_bias_C`, `skip_C`
    and the states, of L slots, are float32. Bits are as in `gated_delta_rule`. Mamba has A as rate, B as write and C as
    read.
    """
    (tokens, channels), rows = x_TC.shape, write_TN.shape[1]
    for name, one in (("step", step_TC), ("gate", gate_TC)):
        require_shape(name, one, (tokens, channels))
    for name, one in (("write", write_TN), ("read", read_TN)):
        require_shape(name, one, (tokens, rows))
    for name, one in (("step_bias", step_bias_C), ("skip", skip_C)):
        require_shape(name, one, (channels,))
    require_shape("rate", rate_NC, (rows, channels))
    require_shape("state", state_LNC, (-1, rows, channels))
    exact = rate_NC, step_bias_C, skip_C, state_LNC
    require(all(one.dtype is torch.float32 for one in exact), "rate, step_bias, skip and state must be float32")
    rows_of_tokens = x_TC, step_TC, gate_TC, write_TN, read_TN
    args = *rows_of_tokens, *exact, sequences
    if x_TC.is_cpu and _cpu().fits(*args):
        fast: Tensor = _cpu().selective_scan(*args)
        return fast
    if x_TC.is_cuda and _kernel().fits(*rows_of_tokens, *exact):
        on_gpu: Tensor = _kernel().selective_scan(*args)
        return on_gpu
    return reference.selective_scan(*args)

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
    from moiety_kernels.selective_scan.inputs import ScanInputs

_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def selective_scan(
    inputs: ScanInputs,
    state_LNC: Tensor,
    sequences: RecurrentSequences,
) -> Tensor:
    """Return out_TC, and replace the states: S ← e^(Δ · rate) · S + write ⊗ (Δ · x), token by token.

    Δ = softplus(step + step_bias), and out = (Sᵀ read + skip · x) · silu(gate). The states, of L slots, are float32.
    Bits are as in `gated_delta_rule`. Raises KernelInputError for other shapes or types.
    """
    (tokens, channels), rows = inputs.x_TC.shape, inputs.write_TN.shape[1]
    for name, one in (("step", inputs.step_TC), ("gate", inputs.gate_TC)):
        require_shape(name, one, (tokens, channels))
    for name, one in (("write", inputs.write_TN), ("read", inputs.read_TN)):
        require_shape(name, one, (tokens, rows))
    for name, one in (("step_bias", inputs.step_bias_C), ("skip", inputs.skip_C)):
        require_shape(name, one, (channels,))
    require_shape("rate", inputs.rate_NC, (rows, channels))
    require_shape("state", state_LNC, (-1, rows, channels))
    exact = *inputs.weights, state_LNC
    require(all(one.dtype is torch.float32 for one in exact), "rate, step_bias, skip and state must be float32")
    args = inputs, state_LNC, sequences
    if inputs.x_TC.is_cpu and _cpu().fits(*args):
        fast: Tensor = _cpu().selective_scan(*args)
        return fast
    if inputs.x_TC.is_cuda and _kernel().fits(inputs, state_LNC):
        on_gpu: Tensor = _kernel().selective_scan(*args)
        return on_gpu
    return reference.selective_scan(*args)

"""Definition of the selective scan, token by token, in float32.

T tokens, C channels, N rows of the state, L slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentSequences
    from moiety_kernels.selective_scan.inputs import ScanInputs


def selective_scan(
    inputs: ScanInputs,
    state_LNC: Tensor,
    sequences: RecurrentSequences,
) -> Tensor:
    """Return out_TC in x's dtype, and replace the states."""
    x_TC, raw_TC, gate_TC, write_TN, read_TN, rate_NC, step_bias_C, skip_C = inputs
    wide_TC, step_TC = x_TC.float(), functional.softplus(raw_TC.float() + step_bias_C)
    scanned_TC = torch.empty_like(wide_TC)
    for begin, end, slot, has_state in sequences.spans():
        state_NC = state_LNC[slot].clone() if has_state else torch.zeros_like(state_LNC[slot])
        for t in range(begin, end):
            written_NC = write_TN[t, :, None].float() * (step_TC[t] * wide_TC[t])
            state_NC = state_NC * (step_TC[t] * rate_NC).exp() + written_NC
            scanned_TC[t] = read_TN[t].float() @ state_NC
        state_LNC[slot] = state_NC
    return ((scanned_TC + skip_C * wide_TC) * functional.silu(gate_TC.float())).to(x_TC.dtype)

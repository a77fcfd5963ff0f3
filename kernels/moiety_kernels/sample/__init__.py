"""Sampling of each row's next token, without a host synchronisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.sample import reference
from moiety_kernels.sample.reference import penalised
from moiety_kernels.sample.rows import IN_PROMPT, Draws, Penalties

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IN_PROMPT", "Draws", "Penalties", "penalised", "sample"]


_kernel = lazy_import(__name__, "kernel")


def sample(logits_LV: Tensor, draws: Draws, penalties: Penalties | None = None) -> Tensor:
    """Return one token per row, int64. The logits, float32, may be overwritten."""
    require(logits_LV.dtype is torch.float32, "the logits must be float32")
    require_shape("uniform", draws.uniform_L, (logits_LV.shape[0],))
    if penalties is not None:
        require_shape("place", penalties.place_L, (logits_LV.shape[0],))
        require_shape("seen", penalties.seen_JV, (penalties.repetition_J.shape[0], logits_LV.shape[1]))
        require(penalties.seen_JV.is_contiguous(), "seen must be contiguous")
    if logits_LV.is_cuda and _kernel().fits(logits_LV):
        on_gpu: Tensor = _kernel().sample(logits_LV, draws, penalties)
        return on_gpu
    return reference.sample(logits_LV, draws, penalties)

"""Properties of the device and of the weights' layout that the grouped products need at launch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.grouped_gemm.tile_cost_model import Block, Scales

GROUP = 8  # tiles that traverse the blocks of columns together
_INTERPRETED_PROGRAMS = 3  # so that programs have several pieces, and unequal numbers of pieces
WORD = 4  # bytes of eight 4-bit weights
ALIGNMENT = 16  # bytes; alignment of rows that are fetched in units of this size


def copied_by_engine(w_ENK: Tensor) -> bool:
    """Return whether the copy engine (TMA) can fetch these weights as one matrix of all experts' rows.

    The rows must be evenly spaced and aligned.
    """
    experts, rows, _ = w_ENK.shape
    size = w_ENK.element_size()
    return (
        _has_copy_engine(w_ENK.device)
        and w_ENK.data_ptr() % ALIGNMENT == 0
        and w_ENK.stride(1) * size % ALIGNMENT == 0
        and (experts == 1 or w_ENK.stride(0) == rows * w_ENK.stride(1))
        and experts * rows < 1 << 31
    )


def rows_aligned(x_TD: Tensor) -> bool:
    """Return whether every row begins at a multiple of 16 bytes."""
    return x_TD.data_ptr() % ALIGNMENT == 0 and x_TD.stride(0) * x_TD.element_size() % ALIGNMENT == 0


def weight_argument(w_ENK: Tensor, block: Block, engine: bool) -> Tensor | TensorDescriptor:
    """Return the weights as a kernel argument: one descriptor for all experts, or the address of the first."""
    if not engine:
        return w_ENK
    experts, rows, inner = w_ENK.shape
    a_step = block.BK // (2 if w_ENK.dtype is torch.uint8 else 1)  # bytes with two numbers each
    return TensorDescriptor(w_ENK, [experts * rows, inner], [w_ENK.stride(1), 1], [block.BN, a_step])


def in_words(w_ENK: Tensor) -> Tensor:
    """Return packed 4-bit weights as int32 with eight weights each, [E, N, K ÷ 8], in the same memory."""
    return w_ENK.view(torch.int32)


def kind_of_scales(scale: Tensor | None) -> Scales:
    """Return the kind of scales: "row" for [E, N], "block" for [E, N, K ÷ 128], "none" without.

    The rows of a block of weights have the same scale. Scales of 4-bit weights, [E, N, K ÷ 32], are handled separately.
    """
    return "none" if scale is None else "row" if scale.dim() == 2 else "block"


def num_programs(device: torch.device, per_sm: int, most_pieces: int) -> int:
    """Return the number of persistent programs: as many as run at once, at most one per piece of work."""
    return max(1, min(most_pieces, _multiprocessors(device) * per_sm))


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    return device.type == "cpu" or (
        torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9, 0)
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

"""Arithmetic of quantized integers with scales and zero points; packing of integers into words of 32 bits.

N outputs, K inputs, G groups of inputs that share a scale. Numbers are unsigned: a weight is (number - zero) · scale,
and without zero points the zero is half the range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.quantization import WeightFormat

PACKED, SCALES, SHAPE = "_packed", "_scale", "_shape"


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return unsigned integers of `bits`, uint8 [..., n · 32 / bits], from int32 words [..., n], lowest bits first.

    Raises ValueError.
    """
    if words.dtype is not torch.int32:
        raise ValueError(f"the values are packed into {words.dtype}, not int32")
    numbers = words.contiguous().view(torch.uint8)  # a word's lowest bits are its first byte
    if bits == 8:
        return numbers
    if bits not in (2, 4):
        raise ValueError(f"integers of {bits} bits are not supported")
    parts = [(numbers >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def to_packed(q_NK: Tensor, scales_NG: Tensor, bits: int) -> dict[str, Tensor]:
    """Return the tensors of a pack-quantized matrix, by name suffix."""
    rows, width = q_NK.shape
    a_word = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int64)
    numbers = functional.pad(q_NK.long() + (1 << bits - 1), (0, -width % a_word)).view(rows, -1, a_word)
    words = (numbers << shifts).sum(-1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {PACKED: signed, SCALES: scales_NG, SHAPE: torch.tensor([rows, width])}


def kept_integers(
    numbers_NK: Tensor,
    scales_NG: Tensor,
    zeros_NG: Tensor | None,
    form: WeightFormat,
    group_of_K: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (bytes [N, K], scales float32 [N, G], each followed by an offset if `form` has them). Raises ValueError.

    The bytes are the numbers plus half their range, as `StoredPrecision` takes them. `group_of_K`: the group of each
    input, if not in order; inputs are then sorted by group.
    """
    _require_groups(numbers_NK, scales_NG, form.group)
    if group_of_K is not None:
        width = numbers_NK.shape[-1]
        numbers_NK = numbers_NK[:, inputs_by_group(group_of_K, width, form.group or width)]
    scales = scales_NG.float()
    if not form.offsets:
        if zeros_NG is not None and not bool((zeros_NG == form.half).all()):
            raise ValueError("config.json says that the quantization is symmetric, but there are other zero points")
        return numbers_NK, scales
    zeros = torch.full_like(scales, form.half) if zeros_NG is None else zeros_NG.float()
    return numbers_NK, torch.stack((scales, (form.half - zeros) * scales), dim=-1).flatten(-2)


def inputs_by_group(group_of_K: Tensor, width: int, group: int) -> Tensor:
    """Return the inputs sorted by group, int64 [K], those of a group in order. Raises ValueError.

    `group_of_K`: the group of each of `width` inputs, `group` of which belong to each.
    """
    sorted_K, order_K = group_of_K.long().sort(stable=True)
    if not torch.equal(sorted_K, torch.arange(width) // group):
        raise ValueError(f"the tensor that assigns {width} inputs to groups does not have {group} in each")
    return order_K


def from_integers(
    numbers_NK: Tensor,
    scales_NG: Tensor,
    zeros_NG: Tensor | None,
    bits: int,
    group: int | None,
    group_of_K: Tensor | None = None,
) -> Tensor:
    """Return the weights, float32 [N, K]. `group_of_K`: the group of each input, if not in order. Raises ValueError."""
    scales = scales_NG.float()
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if zeros_NG is None else zeros_NG.float()
    if group_of_K is not None:
        return (numbers_NK.float() - zeros[:, group_of_K.long()]) * scales[:, group_of_K.long()]
    _require_groups(numbers_NK, scales, group)
    groups = numbers_NK.float().reshape(*scales.shape, -1)
    return ((groups - zeros.unsqueeze(-1)) * scales.unsqueeze(-1)).flatten(-2)


def _require_groups(numbers_NK: Tensor, scales_NG: Tensor, group: int | None) -> None:
    rows, width = numbers_NK.shape
    if tuple(scales_NG.shape) != (rows, width // (group or width)) or width % (group or width):
        raise ValueError(f"scales of shape {tuple(scales_NG.shape)} do not match groups of {group or width}")

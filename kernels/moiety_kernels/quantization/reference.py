"""Definition of quantized weights: w ≈ q · scale, symmetric, round to nearest; with offsets w ≈ q · scale + offset.

Floating 8-bit numbers are e4m3, whose largest is 448. Four bits: of each pack of P inputs, byte j holds input j in its
lower half and input j + P ÷ 2 in its upper half; integers are stored plus 8, floating numbers as their sign and their
index in `MAGNITUDES`.

N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from moiety_kernels.checks import require
from moiety_kernels.quantization.weight import BLOCK, QuantizedWeight, WeightFormat

GREATEST = 448.0  # largest e4m3
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1
_CLIPPINGS = (1.0, 0.95, 0.9, 0.85, 0.8)  # factors of the scale for a group's largest value, tried for the least error


def quantize(weight_NK: Tensor, form: WeightFormat) -> QuantizedWeight:
    """Quantize the weight [..., N, K]: each group uses the candidate scale with the least squared error."""
    if weight_NK.dim() == 3:  # one expert at a time, to save memory and time
        parts = [quantize(one, form) for one in weight_NK]
        values = torch.stack([part.values_NK for part in parts])
        return QuantizedWeight(values, torch.stack([part.scales_NG for part in parts]), form)
    require(form.rows == 1, "weights are rounded by scales of rows, not of blocks")
    q_NK, scales_NG = round_to(weight_NK, form)
    return QuantizedWeight(pack(q_NK, form), scales_NG, form)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Return the weight [..., N, K], float32, with its inputs in the layer's order."""
    if weight.order_K is not None:
        stored_NK, order_K = dequantize(weight.in_stored_order()), weight.order_K
        if order_K.dim() == 1:  # a shard of a matrix may store inputs that do not exist
            exists_K = order_K >= 0
            stored_NK, order_K = stored_NK[:, exists_K], order_K[exists_K]
        place_NK = order_K.long().unsqueeze(-2).expand_as(stored_NK)
        return torch.empty_like(stored_NK).scatter_(-1, place_NK, stored_NK)
    form, q_NK = weight.format, unpack(weight.values_NK, weight.format)
    if form.floating and form.bits == 4:
        table = torch.tensor([*MAGNITUDES, *(-one for one in MAGNITUDES)], device=q_NK.device)
        q_NK = table[q_NK.int()]
    width = q_NK.shape[-1]
    if form.offsets:
        scales, offsets = weight.scales_NG[..., ::2], weight.scales_NG[..., 1::2]
        groups = _in_groups(q_NK, scales.shape[-1]).float()
        return (groups * scales.unsqueeze(-1) + offsets.unsqueeze(-1)).flatten(-2)
    if form.group is not None and width % form.group:  # the last group is shorter
        return q_NK.float() * weight.scales_NG.repeat_interleave(form.group, -1)[..., :width]
    groups = _in_groups(q_NK, weight.scales_NG.shape[-1]).float()
    return (groups * weight.scales_NG.unsqueeze(-1)).flatten(-2)


def round_to(weight_NK: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Return (q_NK, scales_NG float32, with the offsets if there are any); q is int8 or float8_e4m3fn.

    Rounding an already rounded weight returns the same numbers, up to the scales' last bits.
    """
    width = weight_NK.shape[-1]
    unit = max(form.group or BLOCK, form.pack)
    require(form.takes(width), f"{form.name} keeps rows of a multiple of {unit} inputs, not of {width}")
    if form.floating:
        return (_round_to_e4m3 if form.bits == 8 else _round_to_e2m1)(weight_NK, form)
    groups = _in_groups(weight_NK.float(), form.num_groups(width))
    if form.offsets:
        return _round_between(groups, form)
    above, below = groups.amax(-1, keepdim=True) / (form.half - 1), groups.amin(-1, keepdim=True) / -form.half
    widest = torch.maximum(above, below).clamp_min(torch.finfo(torch.float32).tiny)
    best_q, best_scale, best_error = None, None, None
    for clipping in _CLIPPINGS if form.bits < 8 else _CLIPPINGS[:1]:
        scale = widest * clipping
        q = (groups / scale).round().clamp(-form.half, form.half - 1)
        error = (q * scale - groups).square().sum(-1, keepdim=True)
        if best_q is None or best_scale is None or best_error is None:
            best_q, best_scale, best_error = q, scale, error
        else:
            better = error < best_error
            best_q, best_scale = torch.where(better, q, best_q), torch.where(better, scale, best_scale)
            best_error = torch.minimum(error, best_error)
    assert best_q is not None
    assert best_scale is not None
    return best_q.to(torch.int8).flatten(-2), best_scale.squeeze(-1)


def _round_between(groups: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Round with the scales and offsets that map a group's least and greatest number to the ends of the range."""
    least, greatest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((greatest - least) / (2 * form.half - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    offset = least + form.half * scale
    q = ((groups - offset) / scale).round().clamp(-form.half, form.half - 1)
    return q.to(torch.int8).flatten(-2), torch.cat((scale, offset), dim=-1).flatten(-2)


def _round_to_e4m3(weight_NK: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Round with the scales that map a group's largest number to 448."""
    groups = _in_groups(weight_NK.float(), form.num_groups(weight_NK.shape[-1]))
    largest = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0) / GREATEST
    q = (groups / scale).clamp(-GREATEST, GREATEST).to(torch.float8_e4m3fn)
    return q.flatten(-2), scale.squeeze(-1)


def _round_to_e2m1(weight_NK: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Return (codes of e2m1, scales): the smallest power of two by which no number exceeds 6.

    So mxfp4 weights are kept exactly, possibly with another power where no number of a group needs the original one.
    """
    groups = _in_groups(weight_NK.float(), form.num_groups(weight_NK.shape[-1]))
    largest = groups.abs().amax(-1, keepdim=True)
    significand, exponent = torch.frexp(torch.where(largest > 0, largest, 1.0) / MAGNITUDES[-1])
    scale = torch.ldexp(torch.ones_like(largest), exponent - (significand == 0.5).int())
    middles = [(below + above) / 2 for below, above in pairwise(MAGNITUDES)]
    codes = torch.bucketize((groups / scale).abs(), torch.tensor(middles, device=groups.device))
    return (codes + 8 * (groups < 0)).to(torch.int8).flatten(-2), scale.squeeze(-1)


def pack(q_NK: Tensor, form: WeightFormat) -> Tensor:
    """Return the numbers in their stored form."""
    if form.bits == 8:
        return q_NK
    blocks = (q_NK if form.floating else q_NK + 8).to(torch.uint8)
    blocks = blocks.view(*blocks.shape[:-1], -1, 2, form.pack // 2)
    return (blocks[..., 0, :] | (blocks[..., 1, :] << 4)).flatten(-2)


def unpack(values_NK: Tensor, form: WeightFormat) -> Tensor:
    """Return the numbers as int8 or float8_e4m3fn; those of e2m1 as codes."""
    if form.bits == 8:
        return values_NK
    halves = values_NK.view(*values_NK.shape[:-1], -1, 1, form.pack // 2)
    q_NK = torch.cat((halves & 15, halves >> 4), dim=-2).to(torch.int8).flatten(-3)
    return q_NK if form.floating else q_NK - 8


def _in_groups(values_NK: Tensor, num_groups: int) -> Tensor:
    return values_NK.reshape(*values_NK.shape[:-1], num_groups, -1)

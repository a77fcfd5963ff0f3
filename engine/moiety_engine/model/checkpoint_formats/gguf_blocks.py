"""Arithmetic of the blocks of GGUF's tensor types: their numbers, scales and offsets, and the values.

A block holds consecutive values of a row. A weight is number · scale + offset, with one scale and offset for 16 or 32
values; numbers of IQ4 and MXFP4 index a table instead. The types are defined in llama.cpp's ggml-quants.c.

B blocks, G groups of a block, V values of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_engine.gguf.block_types import TYPES
from moiety_engine.model.checkpoint_formats.float8 import powers_of_two
from moiety_engine.model.checkpoint_formats.four_bit_floats import VALUES as E2M1

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

MAX_AT_ONCE = 1 << 22  # values that are dequantized at once, to bound temporary memory
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Numbers(NamedTuple):
    """Numbers of blocks, float32 or an integer type [B, G, V], with scales and offsets, float32 [B, G]."""

    numbers: Tensor
    scales: Tensor
    offsets: Tensor | None = None


def dequantized(raw: Tensor, kind: str) -> Tensor:
    """Return the values, float32 [..., K], of blocks uint8 [..., bytes of a row]."""
    read, blocks = READERS[kind], raw.reshape(-1, _BLOCK_BYTES[kind])
    parts = []
    at_once = max(1, MAX_AT_ONCE // 256)
    for start in range(0, len(blocks), at_once):
        numbers, scales, offsets = read(blocks[start : start + at_once])
        values = numbers.float() * scales.unsqueeze(-1)
        parts.append((values if offsets is None else values + offsets.unsqueeze(-1)).flatten())
    return torch.cat(parts).view(*raw.shape[:-1], -1)


def numbers_of(raw: Tensor, kind: str) -> Numbers:
    """Return the numbers [N, K], scales [N, K / V] and offsets of a matrix of blocks uint8 [N, bytes of a row]."""
    numbers, scales, offsets = READERS[kind](raw.reshape(-1, _BLOCK_BYTES[kind]))
    rows = raw.shape[0]
    return Numbers(
        numbers.reshape(rows, -1), scales.reshape(rows, -1), None if offsets is None else offsets.reshape(rows, -1)
    )


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte of each block, float32 [B, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """Return the numbers in the lower halves of the last dimension's bytes, then those in the upper halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor, at: int) -> Tensor:
    """Return the 32 bits of the four bytes from `at` on, uint8 [B, 32]."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, at : at + 4].unsqueeze(-1) >> places) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Numbers:
    return Numbers(_halves(blocks[:, 2:]).unsqueeze(1).char() - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Numbers:
    return Numbers(_halves(blocks[:, 4:]).unsqueeze(1), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Numbers:
    numbers = _halves(blocks[:, 6:]) | _bits(blocks, 2) << 4
    return Numbers(numbers.unsqueeze(1).char() - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Numbers:
    numbers = _halves(blocks[:, 8:]) | _bits(blocks, 4) << 4
    return Numbers(numbers.unsqueeze(1), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Numbers:
    return Numbers(blocks[:, 2:].contiguous().view(torch.int8).unsqueeze(1), _half(blocks, 0))


def _q2_k(blocks: Tensor) -> Numbers:
    each, packed = blocks[:, :16], blocks[:, 16:80].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    numbers = ((packed >> shifts) & 3).reshape(-1, 16, 16)
    return Numbers(numbers, _half(blocks, 80) * (each & 15), -_half(blocks, 82) * (each >> 4))


def _q3_k(blocks: Tensor) -> Numbers:
    high, packed, each = blocks[:, :32].unsqueeze(1), blocks[:, 32:96].reshape(-1, 2, 1, 32), blocks[:, 96:108]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    low = ((packed >> shifts) & 3).reshape(-1, 16, 16)
    set_high = ((high >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1).reshape(-1, 16, 16)
    lower, upper = _halves(each[:, :8]), (each[:, None, 8:] >> shifts & 3).flatten(1)
    scales = (lower | upper << 4).char() - 32
    return Numbers(low.char() - 4 * (1 - set_high.char()), _half(blocks, 108) * scales)


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and offsets of the eight groups of a Q4_K or Q5_K block, 6 bits each, times the block's."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 2 & 48)), dim=1)
    least = torch.cat((second & 63, (rest >> 4) | (second >> 2 & 48)), dim=1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * least


def _q4_k(blocks: Tensor) -> Numbers:
    numbers = _halves(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return Numbers(numbers, *_scales_and_offsets(blocks))


def _q5_k(blocks: Tensor) -> Numbers:
    low = _halves(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    high = (blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1
    return Numbers(low | high << 4, *_scales_and_offsets(blocks))


def _q6_k(blocks: Tensor) -> Numbers:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    numbers = (low | high << 4).char() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return Numbers(numbers.view(-1, 16, 16), _half(blocks, 208) * scales)


def _iq4_nl(blocks: Tensor) -> Numbers:
    table = torch.tensor(_IQ4, dtype=torch.float32)
    return Numbers(table[_halves(blocks[:, 2:]).int()].unsqueeze(1), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Numbers:
    table = torch.tensor(_IQ4, dtype=torch.float32)
    high = blocks[:, 2:4].contiguous().view(torch.int16).int()
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    scales = (low | ((high >> torch.arange(0, 16, 2)) & 3) << 4) - 32
    return Numbers(table[_halves(blocks[:, 8:].reshape(-1, 8, 16)).int()], _half(blocks, 0) * scales)


def _mxfp4(blocks: Tensor) -> Numbers:
    return Numbers(torch.tensor(E2M1)[_halves(blocks[:, 1:]).int()].unsqueeze(1), powers_of_two(blocks[:, :1]))


READERS: dict[str, Callable[[Tensor], Numbers]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
_BLOCK_BYTES = {one.name: one.num_bytes for one in TYPES.values()}

"""Rotary embedding on a CPU: rotates heads of a row in place, for any width."""

from __future__ import annotations

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import load_f32, store_f32
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import rotate_row


@jit
def rotate_heads(row: int, heads: int, width: int, pairs: int, cos: int, sin: int) -> None:
    """Rotate the entries i and i + pairs of each head, for i < pairs; all arguments but counts are addresses."""
    for head in range(heads):
        start = row + 4 * head * width
        if pairs % LANES == 0:
            rotate_row(start, pairs, cos, sin)
            continue
        for i in range(pairs):
            a, b = load_f32(start, i), load_f32(start, i + pairs)
            c, s = load_f32(cos, i), load_f32(sin, i)
            store_f32(start, i, a * c - b * s)
            store_f32(start, i + pairs, b * c + a * s)

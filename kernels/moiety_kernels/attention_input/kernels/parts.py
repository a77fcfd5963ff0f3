"""Operations on one part of some heads, [heads, entries], for the Triton kernel of attention's input."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def squares_of(part):
    return tl.sum(part.to(tl.float32) * part.to(tl.float32), axis=1)


@triton.jit
def scaled_by(part, factor, weight):
    """Return the part times the factor, rounded before the weight is applied, as the models' own code does."""
    return ((part.to(tl.float32) * factor).to(part.dtype) * weight).to(part.dtype)


@triton.jit
def clamped(part, clip):
    return tl.minimum(tl.maximum(part.to(tl.float32), -clip), clip).to(part.dtype)

"""What an operation must do at least: operations and bytes through memory, and the time below which neither fits.

Every input is counted once and every output once; what a fused implementation keeps on the chip is not counted. T
tokens, R = T · K routed rows, E experts, D model and F expert width, H query and G key-value heads of width d.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moiety_kernels.bench.shapes import LayerShape

_FOUR_BITS = 0.5 + 4 / 32  # and a number's part of the scale that 32 have
ITEM_BYTES = {"int4": _FOUR_BITS, "mxfp4": _FOUR_BITS, "float8": 1, "bfloat16": 2, "float32": 4, "int32": 4}


@dataclass(frozen=True, slots=True)
class Work:
    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a device can do at best."""

    memory_bytes_per_s: float
    flops_per_s: float


def floor_s(work: Work, speeds: Speeds) -> float:
    """The larger of the times for the bytes and for the operations: nothing runs faster."""
    return max(work.bytes / speeds.memory_bytes_per_s, work.flops / speeds.flops_per_s)


def in_float8(speeds: Speeds) -> Speeds:
    """A GPU makes twice as many products of float8 by float8."""
    return replace(speeds, flops_per_s=2 * speeds.flops_per_s)


def is_bound_by_memory(work: Work, speeds: Speeds) -> bool:
    return work.bytes / speeds.memory_bytes_per_s > work.flops / speeds.flops_per_s


def expected_active(num_experts: int, top_k: int, tokens: int) -> float:
    """How many experts get a row when every token draws its experts evenly."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def moe_layer(
    shape: LayerShape, tokens: int, active: float, row_dtype: str = "bfloat16", *, dtype: str | None = None
) -> Work:
    """The weights of the `active` experts; of each routed row its input, its hidden values written and read, and its
    output. Router scores and indices, less than a thousandth of that, are left out, and so is the last sum. `dtype`: of
    the weights, if it is not the shape's."""
    rows = tokens * shape.top_k
    weights = active * 3 * shape.width * shape.hidden * ITEM_BYTES[dtype or shape.dtype]
    return Work(
        flops=6.0 * rows * shape.width * shape.hidden,
        bytes=weights + 2 * rows * (shape.width + shape.hidden) * ITEM_BYTES[row_dtype],
    )


def attention_decode(shape: LayerShape, sequences: int, context: int, dtype: str = "bfloat16") -> Work:
    """One query a sequence over `context` keys and values."""
    cache = 2 * sequences * context * shape.kv_heads * shape.head_width
    rows = 2 * sequences * shape.heads * shape.head_width
    return Work(
        flops=4.0 * sequences * context * shape.heads * shape.head_width,
        bytes=(cache + rows) * ITEM_BYTES[dtype],
    )


def attention_prefill(shape: LayerShape, tokens: int, dtype: str = "bfloat16") -> Work:
    """One sequence of `tokens` tokens from its beginning, each seeing itself and those before it."""
    rows = 2 * tokens * (shape.heads + shape.kv_heads) * shape.head_width
    seen = tokens * (tokens + 1) / 2
    return Work(flops=4.0 * seen * shape.heads * shape.head_width, bytes=rows * ITEM_BYTES[dtype])


def rms_norm(shape: LayerShape, tokens: int, *, add: bool, dtype: str = "bfloat16") -> Work:
    """A row in and a row out, two of each with the residual sum; the weight is float32."""
    moved = (4 if add else 2) * tokens * shape.width * ITEM_BYTES[dtype]
    return Work(flops=(5.0 if add else 4.0) * tokens * shape.width, bytes=moved + 4 * shape.width)


def linear(rows: int, outputs: int, inner: int, dtype: str = "bfloat16") -> Work:
    """The weight and the rows in, the results out."""
    moved = outputs * inner + rows * (inner + outputs)
    return Work(flops=2.0 * rows * outputs * inner, bytes=float(moved * ITEM_BYTES[dtype]))


def sample(shape: LayerShape, rows: int) -> Work:
    """Float32 scores of the vocabulary read once; what is written is nothing beside that."""
    return Work(flops=4.0 * rows * shape.vocabulary, bytes=4.0 * rows * shape.vocabulary)


def route(shape: LayerShape, tokens: int) -> Work:
    """Float32 scores in, weights and indices of the chosen out."""
    return Work(flops=4.0 * tokens * shape.num_experts, bytes=4.0 * tokens * (shape.num_experts + 2 * shape.top_k))

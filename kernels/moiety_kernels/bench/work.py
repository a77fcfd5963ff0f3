"""Least work of an operation: operations and bytes through memory, and the lower bound on its time.

Every input is counted once and every output once; values that a fused implementation keeps on the chip are not counted.
T tokens, R = T · K routed rows, E experts, D model and F expert width, H query and G key-value heads of width d.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moiety_kernels.bench.shapes import DELTA_RULES, LayerShape

_FOUR_BITS = 0.5 + 4 / 32  # and a number's part of the scale that 32 numbers share
ITEM_BYTES = {"int4": _FOUR_BITS, "mxfp4": _FOUR_BITS, "float8": 1, "bfloat16": 2, "float32": 4, "int32": 4}


@dataclass(frozen=True, slots=True)
class Work:
    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Speeds:
    """Peak speeds of a device."""

    memory_bytes_per_s: float
    flops_per_s: float


def floor_s(work: Work, speeds: Speeds) -> float:
    """Return the larger of the times for the bytes and for the operations, a lower bound on the run time."""
    return max(work.bytes / speeds.memory_bytes_per_s, work.flops / speeds.flops_per_s)


def in_float8(speeds: Speeds) -> Speeds:
    """Return the speeds with float8 by float8 products, of which a GPU computes twice as many."""
    return replace(speeds, flops_per_s=2 * speeds.flops_per_s)


def is_bound_by_memory(work: Work, speeds: Speeds) -> bool:
    return work.bytes / speeds.memory_bytes_per_s > work.flops / speeds.flops_per_s


def expected_active(num_experts: int, top_k: int, tokens: int) -> float:
    """Return the expected number of experts with a row when every token draws its experts evenly."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def moe_layer(
    shape: LayerShape, tokens: int, active: float, row_dtype: str = "bfloat16", *, dtype: str | None = None
) -> Work:
    """Return the work of an expert layer: the weights of the `active` experts and the routed rows.

    Each routed row counts its input, its hidden values written and read, and its output. Router scores, indices and the
    last sum are left out: they are less than a thousandth. `dtype`: type of the weights, if it is not the shape's.
    """
    rows = tokens * shape.top_k
    weights = active * 3 * shape.width * shape.hidden * ITEM_BYTES[dtype or shape.dtype]
    return Work(
        flops=6.0 * rows * shape.width * shape.hidden,
        bytes=weights + 2 * rows * (shape.width + shape.hidden) * ITEM_BYTES[row_dtype],
    )


def attention_decode(shape: LayerShape, sequences: int, context: int, dtype: str = "bfloat16") -> Work:
    """Return the work of one query per sequence over `context` keys and values."""
    cache = 2 * sequences * context * shape.kv_heads * shape.head_width
    rows = 2 * sequences * shape.heads * shape.head_width
    return Work(
        flops=4.0 * sequences * context * shape.heads * shape.head_width,
        bytes=(cache + rows) * ITEM_BYTES[dtype],
    )


def attention_prefill(shape: LayerShape, tokens: int, dtype: str = "bfloat16") -> Work:
    """Return the work of one sequence of `tokens` tokens from its start; each attends to itself and earlier tokens."""
    rows = 2 * tokens * (shape.heads + shape.kv_heads) * shape.head_width
    seen = tokens * (tokens + 1) / 2
    return Work(flops=4.0 * seen * shape.heads * shape.head_width, bytes=rows * ITEM_BYTES[dtype])


def recurrence(kind: str, shape: LayerShape, tokens: int, states: int, dtype: str = "bfloat16") -> Work:
    """Return the work of a recurrence of `states` sequences, each entry of a state in turn: write and read, and recall.

    Only delta rules recall. Rows count once each, float32 states in and out, and decays, and a delta rule's strengths,
    are float32.
    """
    r, is_delta = shape.recurrences[kind], kind in DELTA_RULES
    rows = tokens * 2 * (r.heads * r.width + r.value_heads * r.value_width) * ITEM_BYTES[dtype]
    gates = 4.0 * tokens * r.value_heads * (r.gates + is_delta)
    flops = (6.0 if is_delta else 4.0) * tokens * r.state_entries
    return Work(flops=flops, bytes=rows + gates + 8.0 * states * r.state_entries)


def index_select(shape: LayerShape, sequences: int, context: int, dtype: str = "bfloat16") -> Work:
    """Return the work of one query per sequence that scores `context` index keys: the keys read once."""
    sparse = shape.sparse
    assert sparse is not None
    pairs = sequences * context * sparse.index_width
    return Work(flops=2.0 * pairs * sparse.index_heads, bytes=float(pairs * ITEM_BYTES[dtype]))


def sparse_attention(shape: LayerShape, tokens: int, dtype: str = "bfloat16") -> Work:
    """Return the work of attention of each token to its selected rows: each row read once by each token."""
    sparse = shape.sparse
    assert sparse is not None
    rows = tokens * sparse.top_k
    outputs = tokens * sparse.heads * (sparse.row_width + sparse.value_width)
    return Work(
        flops=2.0 * rows * sparse.heads * (sparse.row_width + sparse.value_width),
        bytes=float((rows * sparse.row_width + outputs) * ITEM_BYTES[dtype]),
    )


def rms_norm(shape: LayerShape, tokens: int, *, add: bool, dtype: str = "bfloat16") -> Work:
    """Return the work: a row in and a row out, two of each with the residual sum; the weight is float32."""
    moved = (4 if add else 2) * tokens * shape.width * ITEM_BYTES[dtype]
    return Work(flops=(5.0 if add else 4.0) * tokens * shape.width, bytes=moved + 4 * shape.width)


def linear(rows: int, outputs: int, inner: int, dtype: str = "bfloat16") -> Work:
    """Return the work: the weight and the rows in, the results out."""
    moved = outputs * inner + rows * (inner + outputs)
    return Work(flops=2.0 * rows * outputs * inner, bytes=float(moved * ITEM_BYTES[dtype]))


def sample(shape: LayerShape, rows: int) -> Work:
    """Return the work: float32 scores of the vocabulary read once; the writes are negligible."""
    return Work(flops=4.0 * rows * shape.vocabulary, bytes=4.0 * rows * shape.vocabulary)


def route(shape: LayerShape, tokens: int) -> Work:
    """Return the work: float32 scores in, weights and indices of the chosen experts out."""
    return Work(flops=4.0 * tokens * shape.num_experts, bytes=4.0 * tokens * (shape.num_experts + 2 * shape.top_k))

"""The operations beside the expert layer as timed calls: ours and torch's own.

T tokens, S sequences, E experts, D model width, H query and G key-value heads of width d, N blocks of P slots.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moiety_kernels.bench import work
from moiety_kernels.bench.operation import Operation, Point, dtype_name, dtype_on
from moiety_kernels.bench.recurrences import recurrent_operations
from moiety_kernels.bench.routings import draw_logits, spec_of
from moiety_kernels.bench.shapes import DECODE_CONTEXT, SPARSE_CONTEXT, LayerShape, SparseShape
from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_kernels.lightning_indexer import select_tokens
from moiety_kernels.linear import linear
from moiety_kernels.paged_attention import paged_attention
from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters
from moiety_kernels.rms_norm import add_rms_norm, rms_norm
from moiety_kernels.route import route
from moiety_kernels.route.reference import route as route_in_torch
from moiety_kernels.sample import Draws, sample
from moiety_kernels.sample.reference import sample as sample_in_torch
from moiety_kernels.sparse_mla_attention import sparse_mla_attention

_EPS = 1e-6
_PLACES = 16  # slots per cache block


def _rms_norm(shape: LayerShape, tokens: int, device: torch.device) -> Point:
    x, weight = _rows(tokens, shape, device), torch.rand(shape.width, device=device) + 0.5
    narrow = weight.to(x.dtype)
    dtype = dtype_name(x)
    return Point(
        lambda: rms_norm(x, weight, _EPS),
        {"torch_rms_norm": lambda: functional.rms_norm(x, (shape.width,), narrow, _EPS)},
        work.rms_norm(shape, tokens, add=False, dtype=dtype),
        dtype,
    )


def _add_rms_norm(shape: LayerShape, tokens: int, device: torch.device) -> Point:
    """Time the fused normalisation; ours may write into its inputs, so they shrink between calls, at unchanged cost."""
    x, delta = _rows(tokens, shape, device), torch.zeros_like(_rows(tokens, shape, device))
    weight = torch.ones(shape.width, device=device)
    narrow = weight.to(x.dtype)
    dtype = dtype_name(x)

    def in_torch() -> object:
        total = x + delta
        return total, functional.rms_norm(total, (shape.width,), narrow, _EPS)

    least = work.rms_norm(shape, tokens, add=True, dtype=dtype)
    return Point(lambda: add_rms_norm(x, delta, weight, _EPS), {"torch_add_rms_norm": in_torch}, least, dtype)


def _invariant_linear(shape: LayerShape, tokens: int, device: torch.device) -> Point:
    """Time the projection of attention's queries."""
    x_TD = _rows(tokens, shape, device)
    weight_ND = _projection(shape, device)
    return Point(
        lambda: linear(x_TD, weight_ND, invariant=True),
        {"torch_linear": lambda: functional.linear(x_TD, weight_ND)},
        work.linear(tokens, weight_ND.shape[0], weight_ND.shape[1], dtype_name(x_TD)),
        dtype_name(x_TD),
    )


def _projection(shape: LayerShape, device: torch.device) -> Tensor:
    drawn_ND = torch.randn(shape.heads * shape.head_width, shape.width, device=device)
    return torch.mul(drawn_ND, shape.width**-0.5).to(dtype_on(device))


def _route(shape: LayerShape, tokens: int, device: torch.device) -> Point:
    logits_TE = draw_logits("uniform", tokens, shape.num_experts, torch.Generator().manual_seed(tokens)).to(device)
    return Point(
        lambda: route(logits_TE, spec_of(shape)),
        {"torch_topk": lambda: route_in_torch(logits_TE, spec_of(shape))},
        work.route(shape, tokens),
        "float32",
    )


def _sample(shape: LayerShape, rows: int, device: torch.device) -> Point:
    """Time sampling with top-p 0.9 in every row.

    The temperature leaves logits unchanged, since a call may overwrite them.
    """
    logits_LV = 4 * torch.randn(rows, shape.vocabulary, device=device)

    def each(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    draws = Draws(
        temperature_L=each(1.0, torch.float32),
        top_k_L=each(0, torch.int32),
        top_p_L=each(0.9, torch.float64),
        min_p_L=each(0.0, torch.float32),
        uniform_L=torch.rand(rows, dtype=torch.float64, device=device),
    )
    return Point(
        lambda: sample(logits_LV, draws),
        {"torch_sort": lambda: sample_in_torch(logits_LV, draws)},
        work.sample(shape, rows),
        "float32",
    )


def _decode(shape: LayerShape, sequences: int, device: torch.device) -> Point:
    """Time decode attention.

    A sequence's blocks are scattered over the cache; the rival's keys and values are contiguous.
    """
    context = _context(device)
    k, v = _cache(shape, sequences, context, device), _cache(shape, sequences, context, device)
    cache, parameters = LayerCache(k, v), AttentionParameters(shape.head_width**-0.5)
    q_THd = torch.randn(sequences, shape.heads, shape.head_width, device=device).to(k.dtype)
    table_SB = torch.randperm(k.shape[0], device=device).to(torch.int32).view(sequences, -1)
    start = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(start, lengths, table_SB, 1, context, num_decode=sequences)
    flat = (sequences, shape.kv_heads, context, shape.head_width)

    def run() -> Tensor:
        return paged_attention(q_THd, cache, metadata, parameters)

    def in_torch() -> Tensor:
        return functional.scaled_dot_product_attention(
            q_THd[:, :, None], k.view(flat), v.view(flat), scale=parameters.scale, enable_gqa=True
        )

    least = work.attention_decode(shape, sequences, context, dtype_name(k))
    return Point(run, {"torch_sdpa_contiguous": in_torch}, least, dtype_name(k))


def _prefill(shape: LayerShape, tokens: int, device: torch.device) -> Point:
    k, v = _cache(shape, 1, tokens, device), _cache(shape, 1, tokens, device)
    cache, parameters = LayerCache(k, v), AttentionParameters(shape.head_width**-0.5)
    q_THd = torch.randn(tokens, shape.heads, shape.head_width, device=device).to(k.dtype)
    table_SB = torch.randperm(k.shape[0], device=device).to(torch.int32).view(1, -1)
    start = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    lengths = torch.tensor([tokens], dtype=torch.int32, device=device)
    metadata = AttentionMetadata(start, lengths, table_SB, tokens, tokens)
    k_HTd, v_HTd = (c.transpose(0, 1).reshape(1, shape.kv_heads, -1, shape.head_width)[:, :, :tokens] for c in (k, v))

    def run() -> Tensor:
        return paged_attention(q_THd, cache, metadata, parameters)

    def in_torch() -> Tensor:
        return functional.scaled_dot_product_attention(
            q_THd.transpose(0, 1)[None], k_HTd, v_HTd, is_causal=True, scale=parameters.scale, enable_gqa=True
        )

    least = work.attention_prefill(shape, tokens, dtype_name(k))
    return Point(run, {"torch_sdpa_contiguous": in_torch}, least, dtype_name(k))


def _index_select(shape: LayerShape, sequences: int, device: torch.device) -> Point:
    """Return decodes that each score a context of their own and select from it."""
    sparse, context = _sparse(shape), _sparse_context(device)
    q = torch.randn(sequences, sparse.index_heads, sparse.index_width, device=device).to(dtype_on(device))
    weight = torch.randn(sequences, sparse.index_heads, device=device)
    blocks = context // _PLACES
    keys = torch.randn(sequences * blocks, _PLACES, sparse.index_width, device=device).to(dtype_on(device))
    table = torch.randperm(sequences * blocks, device=device).to(torch.int32).view(sequences, blocks)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(starts, lengths, table, 1, context, num_decode=sequences)

    def run() -> Tensor:
        return select_tokens(q, weight, keys, metadata, sparse.top_k)[0]

    def in_torch() -> Tensor:
        own = keys[table.long()].flatten(1, 2)
        products = torch.einsum("shi,sci->shc", q, own).relu()
        return (weight.unsqueeze(1) @ products.float()).squeeze(1).topk(sparse.top_k).indices

    return Point(
        run, {"torch_einsum_topk": in_torch}, work.index_select(shape, sequences, context, dtype_name(q)), dtype_name(q)
    )


def _sparse_decode(shape: LayerShape, sequences: int, device: torch.device) -> Point:
    return _sparse_attention(shape, sequences, sequences, device)


def _sparse_prefill(shape: LayerShape, tokens: int, device: torch.device) -> Point:
    return _sparse_attention(shape, tokens, 0, device)


def _sparse_attention(shape: LayerShape, tokens: int, num_decode: int, device: torch.device) -> Point:
    """Return attention to slots at random places of a context per decode, or of one that all tokens share."""
    sparse, context = _sparse(shape), _sparse_context(device)
    blocks = max(1, num_decode) * context // _PLACES
    q = torch.randn(tokens, sparse.heads, sparse.row_width, device=device).to(dtype_on(device))
    rows = torch.randn(blocks, _PLACES, sparse.row_width, device=device).to(dtype_on(device))
    cache = LatentCache(rows, sparse.value_width)
    slots = torch.randint(blocks * _PLACES, (tokens, sparse.top_k), dtype=torch.int32, device=device)
    counts = torch.full((tokens,), sparse.top_k, dtype=torch.int32, device=device)
    scale = sparse.row_width**-0.5

    def run() -> Tensor:
        return sparse_mla_attention(q, cache, slots, counts, scale, num_decode=num_decode)

    return Point(run, {}, work.sparse_attention(shape, tokens, dtype_name(q)), dtype_name(q))


def _sparse(shape: LayerShape) -> SparseShape:
    assert shape.sparse is not None
    return shape.sparse


def _sparse_context(device: torch.device) -> int:
    return SPARSE_CONTEXT if device.type == "cuda" else SPARSE_CONTEXT // 64


def _sparse_bytes(shape: LayerShape, tokens: int, contexts: int) -> int:
    """Return the bytes of keys and rows in float32, as they are drawn, and in the cache's type, and of queries."""
    sparse = _sparse(shape)
    rows = contexts * SPARSE_CONTEXT * (sparse.index_width + sparse.row_width)
    return 8 * rows + 16 * tokens * sparse.heads * sparse.row_width + 8 * tokens * sparse.top_k


def _rows(tokens: int, shape: LayerShape, device: torch.device) -> Tensor:
    return torch.randn(tokens, shape.width, device=device).to(dtype_on(device))


def _cache(shape: LayerShape, sequences: int, context: int, device: torch.device) -> Tensor:
    blocks = sequences * -(-context // _PLACES)
    return torch.randn(blocks, shape.kv_heads, _PLACES, shape.head_width, device=device).to(dtype_on(device))


def _context(device: torch.device) -> int:
    return DECODE_CONTEXT if device.type == "cuda" else DECODE_CONTEXT // 8


def _cache_bytes(shape: LayerShape, tokens: int) -> int:
    """Return the bytes of keys and values in float32, as they are drawn, and again in the cache's type."""
    return 16 * tokens * shape.kv_heads * shape.head_width


OPERATIONS = {
    one.name: one
    for one in (
        Operation("rms_norm", lambda s, t: True, lambda s, t: 12 * t * s.width, _rms_norm),
        Operation("add_rms_norm", lambda s, t: True, lambda s, t: 24 * t * s.width, _add_rms_norm),
        Operation(
            "invariant_linear",
            lambda s, t: s.heads > 0,
            lambda s, t: 6 * s.width * (t + s.heads * s.head_width) + 6 * t * s.heads * s.head_width,
            _invariant_linear,
        ),
        Operation("route", lambda s, t: True, lambda s, t: 32 * t * s.num_experts, _route),
        Operation("sample", lambda s, t: s.vocabulary > 0 and t <= 256, lambda s, t: 48 * t * s.vocabulary, _sample),
        Operation(
            "paged_attention_decode",
            lambda s, t: s.heads > 0 and t <= 256,
            lambda s, t: _cache_bytes(s, t * DECODE_CONTEXT),
            _decode,
        ),
        Operation(
            "paged_attention_prefill",
            lambda s, t: s.heads > 0 and t >= 256,
            lambda s, t: _cache_bytes(s, t) + 2 * t * t,  # masks without a fused kernel
            _prefill,
        ),
        Operation(
            "index_select",
            lambda s, t: s.sparse is not None and t <= 64,
            lambda s, t: 2 * _sparse_bytes(s, t, t),
            _index_select,
        ),
        Operation(
            "sparse_attention_decode",
            lambda s, t: s.sparse is not None and t <= 64,
            lambda s, t: _sparse_bytes(s, t, t),
            _sparse_decode,
        ),
        Operation(
            "sparse_attention_prefill",
            lambda s, t: s.sparse is not None and 256 <= t <= 4096,
            lambda s, t: _sparse_bytes(s, t, 1),
            _sparse_prefill,
        ),
        *recurrent_operations(),
    )
}

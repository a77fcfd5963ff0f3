"""Attention over a paged cache in Triton, in the manner of FlashAttention. The README beside this describes the design.

T tokens, S sequences, B blocks per row, I splits, H query heads, G key-value heads, d width of a key, v of a value, N
blocks, P slots per block.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.gpu.targets import GFX942, SM_80, SM_90, SM_100
from moiety_kernels.paged_attention.cases import of_shard, variant
from moiety_kernels.paged_attention.kernels.decode import decode, merge
from moiety_kernels.paged_attention.kernels.prefill import prefill
from moiety_kernels.paged_attention.tiles import (
    CHUNKS,
    EVERYTHING,
    MAX_WIDTH,
    MERGED_ROWS,
    SLIDING,
    SPAN,
    Device,
    Shape,
    constants,
    constants_of_merge,
    decode_programs,
    decode_tiles,
    prefill_tiles,
    splits,
)

if TYPE_CHECKING:
    from moiety_kernels.kv_store.caches import LayerCache
    from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters


def fits(q_THd: Tensor, cache: LayerCache) -> bool:
    """Return whether the kernels support these tensors."""
    k_NGPd, v_NGPv = cache.k_NGPd, cache.v_NGPd
    return (
        q_THd.dtype in (torch.float16, torch.bfloat16)
        and (k_NGPd.dtype is q_THd.dtype or (k_NGPd.itemsize == 1 and converts(k_NGPd)))
        and max(k_NGPd.shape[3], v_NGPv.shape[3]) <= MAX_WIDTH
        and q_THd.stride(2) == k_NGPd.stride(3) == v_NGPv.stride(3) == 1
    )


def paged_attention(
    q_THd: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    parameters: AttentionParameters,
    *,
    shared: bool = False,
    lse_TH: Tensor | None = None,
) -> Tensor:
    """Return out_THv, contiguous.

    `shared`: a value is the first of its key's `parts`. `lse_TH`, float32 and contiguous, takes the logarithm of the
    sum of exponentials of each row's scores; the output is then float32. Launches depend only on shapes, `num_decode`
    and `max_context`.
    """
    k_NGPd, v_NGPv, window = cache.k_NGPd, cache.v_NGPd, parameters.window
    num_kv_heads, places, key_width = k_NGPd.shape[1:]
    num_tokens, num_heads = q_THd.shape[:2]
    value_width = v_NGPv.shape[3]
    windowed = CHUNKS if parameters.chunked and window else SLIDING if window else EVERYTHING
    sizes = q_THd.itemsize, k_NGPd.itemsize
    shape = Shape(
        num_kv_heads, num_heads // num_kv_heads, key_width, value_width, *sizes, windowed, shared, metadata.num_shards
    )
    out_THv = q_THd.new_empty(num_tokens, num_heads, value_width, dtype=None if lse_TH is None else torch.float32)
    strides = *q_THd.stride()[:2], *k_NGPd.stride()[:3], *v_NGPv.stride()[:3]
    layer = _Layer(
        shape,
        _device(q_THd.device),
        (q_THd, k_NGPd, v_NGPv, out_THv),
        (parameters.sinks_H, cache.k_scale_NGP, cache.v_scale_NGP),
        (window or 0, parameters.scale / math.log(2), metadata.block_table_SB.stride(0), *strides),
        {"PLACES": places, "SINKS": parameters.sinks_H is not None, "SCALED": cache.k_scale_NGP is not None},
        {"p_lse": lse_TH, "shard": metadata.shard},
    )
    sequences, num_decode = (
        (metadata.query_start_S1, metadata.context_len_S, metadata.block_table_SB),
        metadata.num_decode,
    )
    if num_decode:
        seen = metadata.max_context if window is None else min(window, metadata.max_context)
        _decode(layer, sequences, num_decode, -(-seen // metadata.num_shards))
    if num_tokens > num_decode:
        starts, contexts, tables = (one[num_decode:] for one in sequences)
        chunks = starts, contexts, tables
        _prefill(layer, chunks, num_tokens - num_decode)
    return out_THv


@dataclass(frozen=True, slots=True)
class _Layer:
    """Launch arguments that prefill and decode share, in argument order."""

    shape: Shape
    device: Device
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    extras: tuple[Tensor | None, Tensor | None, Tensor | None]
    numbers: tuple[Any, ...]
    flags: dict[str, Any]
    of_shard: dict[str, Any]  # which also merging takes


def _prefill(layer: _Layer, chunks: tuple[Tensor, Tensor, Tensor], num_tokens: int) -> None:
    """Write the rows of all sequences of `chunks`, which have at most `num_tokens` tokens together."""
    shape, num_chunks = layer.shape, chunks[1].shape[0]
    tiles = prefill_tiles(shape, layer.device)
    num_tiles = num_tokens * shape.group // tiles.rows + num_chunks
    prefill[(num_tiles * shape.num_kv_heads,)](
        *layer.tensors,
        *chunks,
        *layer.extras,
        num_chunks,
        shape.num_heads,
        *layer.numbers,
        **layer.flags,
        **layer.of_shard,
        **constants(shape, tiles),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _decode(layer: _Layer, sequences: tuple[Tensor, Tensor, Tensor], num_decode: int, max_seen: int) -> None:
    """Write the rows of the first `num_decode` sequences."""
    shape, (q_THd, _, _, out_THv) = layer.shape, layer.tensors
    tiles, rule = decode_tiles(shape, layer.device), splits(shape)
    num_splits = rule.bound(max_seen)
    items = num_decode * num_splits * shape.num_kv_heads * -(-shape.group // tiles.rows)
    merges = num_splits > 1 or shape.shared
    part_SIHv, weight_SIH = (
        q_THd.new_empty(num_decode if merges else 0, num_splits, shape.num_heads, *rest, dtype=torch.float32)
        for rest in ((shape.value_width,), ())
    )
    split = {"LEAST": rule.least, "MOST": rule.most}
    decode[(decode_programs(items, tiles, shape, layer.device),)](
        *layer.tensors,
        part_SIHv,
        weight_SIH,
        *sequences,
        *layer.extras,
        num_decode,
        shape.num_heads,
        num_splits,
        *layer.numbers,
        **layer.flags,
        **layer.of_shard,
        **constants(shape, tiles),
        **split,
        SPAN=max(SPAN, triton.next_power_of_2(num_decode)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if merges:
        merge[(num_decode, triton.cdiv(shape.num_heads, MERGED_ROWS))](
            part_SIHv,
            weight_SIH,
            out_THv,
            *sequences[:2],
            shape.num_heads,
            num_splits,
            layer.numbers[0],
            **constants_of_merge(shape, tiles),
            **split,
            **layer.of_shard,
        )


def converts(cache: Tensor) -> bool:
    """Return whether the GPU supports the cache's type."""
    return (
        cache.dtype is torch.int8
        or torch.version.hip is not None
        or torch.cuda.get_device_capability(cache.device) >= (8, 9)
    )


@functools.cache
def _device(device: torch.device) -> Device:
    if device.type == "cpu":  # interpreted: one program at a time, so each takes several items
        return Device(1, SM_90.max_shared_bytes)
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    reads_shared = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return Device(properties["multiprocessor_count"], properties["max_shared_mem"], reads_shared)


def compile_cases() -> list[CompileCase]:
    """Return cases for each head width, kind of layer and kernel: all for Hopper, the usual ones for other targets."""
    layers = {
        "64, window, sinks": Shape(8, 8, 64, 64, 2, 2, SLIDING, False),
        "80": Shape(32, 1, 80, 80, 2, 2, EVERYTHING, False),
        "96": Shape(32, 1, 96, 96, 2, 2, EVERYTHING, False),
        "112": Shape(32, 1, 112, 112, 2, 2, EVERYTHING, False),
        "128": Shape(4, 8, 128, 128, 2, 2, EVERYTHING, False),
        "128, window": Shape(8, 4, 128, 128, 2, 2, SLIDING, False),
        "128, chunks": Shape(8, 5, 128, 128, 2, 2, CHUNKS, False),
        "128, fp8": Shape(8, 12, 128, 128, 2, 1, EVERYTHING, False),
        "128, int8": Shape(4, 8, 128, 128, 2, 1, EVERYTHING, False),
        "192": Shape(8, 4, 192, 192, 2, 2, EVERYTHING, False),
        "192, values of 128": Shape(16, 1, 192, 128, 2, 2, EVERYTHING, False),
        "256, window": Shape(4, 2, 256, 256, 2, 2, SLIDING, False),
    }
    decoded = ["64, window, sinks", "128", "128, chunks", "128, fp8", "128, int8", "192", "256, window"]
    for kind in ("fp8", "int8"):  # for every width in use
        narrow = {
            f"64, window, sinks, {kind}": Shape(8, 8, 64, 64, 2, 1, SLIDING, False),
            f"128, window, {kind}": Shape(8, 4, 128, 128, 2, 1, SLIDING, False),
            f"192, {kind}": Shape(8, 4, 192, 192, 2, 1, EVERYTHING, False),
            f"256, {kind}": Shape(4, 2, 256, 256, 2, 1, EVERYTHING, False),
            f"256, window, {kind}": Shape(4, 2, 256, 256, 2, 1, SLIDING, False),
        }
        layers |= narrow
        decoded += narrow
    found = [variant(prefill, name, shape, SM_90) for name, shape in layers.items()]
    found += [variant(decode, name, layers[name], SM_90) for name in decoded]
    found.append(variant(merge, "128", layers["128"]))
    for name in ("128", "128, window"):
        found += [variant(kernel, f"{name}, shards", of_shard(layers[name]), SM_90) for kernel in (prefill, decode)]
    found.append(variant(merge, "128, shards", of_shard(layers["128"]), SM_90))
    for target in (SM_80, SM_100, GFX942):
        found += [variant(kernel, "128", layers["128"], target) for kernel in (prefill, decode)]
    return [*found, variant(decode, "128, fp8", layers["128, fp8"], SM_100)]

"""The attention kernels' compile cases for GPUs that are not present: for a layer, with the tiles of a target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.gpu.targets import SM_90, Target
from moiety_kernels.paged_attention.kernels.decode import decode, merge
from moiety_kernels.paged_attention.tiles import (
    SLIDING,
    SPAN,
    Device,
    Shape,
    constants,
    constants_of_merge,
    decode_tiles,
    prefill_tiles,
    splits,
)

_PLACES = 16
_CACHES = {1: "*fp8e4nv", 2: "*bf16"}
_WHOLE = "int8"  # part of a layer's name if its cache is int8 with scales
_UNALIGNED = frozenset(
    ("p_start", "p_context", "p_table", "num_sequences", "num_splits", "num_heads", "window", "table_row", "shard")
)


def of_shard(shape: Shape) -> Shape:
    """Return the shape of a layer whose cache has one of two shards."""
    return replace(shape, num_shards=2)


def variant(kernel: Any, name: str, shape: Shape, target: Target | None = None) -> CompileCase:
    """Return `kernel` for `shape` on `target`, or on every target.

    With several shards it reads one of them, and writes float32 and the LSE.
    """
    of = target or SM_90
    device = Device(1, of.max_shared_bytes, of.backend == "cuda" and int(of.arch) >= 90)
    tiles = decode_tiles(shape, device) if kernel in (decode, merge) else prefill_tiles(shape, device)
    rule = splits(shape)
    known = constants(shape, tiles) | {"LEAST": rule.least, "MOST": rule.most, "SPAN": SPAN, "PLACES": _PLACES}
    known |= {"SINKS": shape.windowed == SLIDING and shape.num_shards == 1, "SCALED": _WHOLE in name}
    if shape.num_shards == 1:
        known["p_lse"] = None
    if kernel is merge:
        known |= constants_of_merge(shape, tiles)
    types = {"p_q": "*bf16", "p_out": "*bf16" if shape.num_shards == 1 else "*fp32", "factor": "fp32"}
    types |= dict.fromkeys(("p_k", "p_v"), "*i8" if _WHOLE in name else _CACHES[shape.cache_bytes])
    types |= dict.fromkeys(("p_start", "p_context", "p_table"), "*i32")
    types |= dict.fromkeys(("p_part", "p_weight", "p_sink", "p_k_scale", "p_v_scale", "p_lse"), "*fp32")
    given = [argument for argument in kernel.arg_names if argument not in known]
    where = "" if target is None else f" ({target.name})"
    return CompileCase(
        f"{kernel.__name__} {name}{where}",
        kernel,
        {argument: types.get(argument, "i32") for argument in given},
        {constant: value for constant, value in known.items() if constant in kernel.arg_names},
        num_warps=4 if kernel is merge else tiles.num_warps,
        num_stages=3 if kernel is merge else tiles.num_stages,
        only=() if target is None else (target.name,),
        unaligned=_UNALIGNED,
    )

"""Operations before latent attention in Triton, in one launch.

One program handles a token's cache row, another its queries' latent row. T tokens, C fused width, L width of a cache
row, R rotated pairs, N blocks, P slots per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from moiety_kernels.attention_input.kernel import kept
from moiety_kernels.gpu.cases import CompileCase

if TYPE_CHECKING:
    from moiety_kernels.kv_store.caches import LatentCache
    from moiety_kernels.latent_input.plan import LatentInputPlan
    from moiety_kernels.rope.inputs import RotaryInputs

_MAX_WIDTH = 16384  # largest width that is normalised at once; it fits in the registers of 16 warps
_LATENT_WARPS = 2


def fits(input_TC: Tensor, plan: LatentInputPlan, cos_PR: Tensor, cache_NPL: Tensor) -> bool:
    """Return whether `latent_input` supports these tensors."""
    widths = (norm.shape[0] for norm in (plan.latent_norm, plan.query_norm) if norm is not None)
    return max(widths) <= _MAX_WIDTH and input_TC.stride(1) == 1 and cache_NPL.stride(2) == 1 and cos_PR.is_contiguous()


def latent_input(
    input_TC: Tensor, plan: LatentInputPlan, rotary: RotaryInputs, cache: LatentCache, slots_T: Tensor
) -> Tensor:
    """Return the queries' part: a view of the input where the plan leaves it unchanged, else its normalised rows."""
    (tokens, fused), rows_NPL = input_TC.shape, cache.rows_NPL
    query_TQ = input_TC[:, : fused - rows_NPL.shape[2]]
    out_TQ = None if plan.query_norm is None else torch.empty_like(query_TQ, memory_format=torch.contiguous_format)
    latent_width, query_width = plan.latent_norm.shape[0], query_TQ.shape[1]
    if tokens:
        _latent_input[(tokens, 1 if out_TQ is None else 2)](
            input_TC,
            out_TQ,
            rows_NPL,
            cache.latent_scale_NP,
            cache.rotated_scale_NP,
            plan.latent_norm,
            plan.query_norm,
            *rotary,
            slots_T,
            input_TC.stride(0),
            *rows_NPL.stride()[:2],
            rows_NPL.shape[1],
            plan.norm_eps,
            **_shape(query_width, latent_width, rotary.cos_PR.shape[1], normed=out_TQ is not None),
        )
    return query_TQ if out_TQ is None else out_TQ


def _shape(query_width: int, latent_width: int, pairs: int, *, normed: bool) -> dict[str, int]:
    block = triton.next_power_of_2(query_width) if normed else 1
    return {
        "QUERY": query_width,
        "LATENT": latent_width,
        "PAIRS": pairs,
        "QUERY_BLOCK": block,
        "LATENT_BLOCK": triton.next_power_of_2(latent_width),
        "PAIRS_BLOCK": triton.next_power_of_2(pairs),
        "num_warps": max(_LATENT_WARPS, min(16, max(block, latent_width) // 512)),
    }


@triton.jit
def _latent_input(
    p_x,
    p_out,
    p_cache,
    p_latent_scale,
    p_rotated_scale,
    p_latent_norm,
    p_query_norm,
    p_cos,
    p_sin,
    p_positions,
    p_slots,
    x_stride,
    cache_block,
    cache_place,
    places,
    eps,
    QUERY: tl.constexpr,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    p_row = p_x + i_token * x_stride
    if tl.program_id(1) == 1:
        if p_out is not None:
            i_query = tl.arange(0, QUERY_BLOCK)
            normed = _normed(p_row, p_query_norm, i_query, QUERY, eps)
            tl.store(p_out + i_token * QUERY + i_query, normed, mask=i_query < QUERY)
        return
    slot = tl.load(p_slots + i_token)
    if slot < 0:
        return
    block, place = slot // places, slot % places
    i_latent, i_pair = tl.arange(0, LATENT_BLOCK), tl.arange(0, PAIRS_BLOCK)
    m_latent, m_pair = i_latent < LATENT, i_pair < PAIRS
    latent = _normed(p_row + QUERY, p_latent_norm, i_latent, LATENT, eps)
    p_rotated = p_row + QUERY + LATENT + i_pair
    i_angle = tl.load(p_positions + i_token).to(tl.int64) * PAIRS + i_pair
    cos = tl.load(p_cos + i_angle, mask=m_pair, other=0.0)
    sin = tl.load(p_sin + i_angle, mask=m_pair, other=0.0)
    a = tl.load(p_rotated, mask=m_pair, other=0.0).to(tl.float32)
    b = tl.load(p_rotated + PAIRS, mask=m_pair, other=0.0).to(tl.float32)
    first, second = (a * cos - b * sin).to(latent.dtype), (b * cos + a * sin).to(latent.dtype)
    if p_latent_scale is not None:
        i_scale = block * places + place
        latent_scale = _scale(tl.max(tl.abs(latent.to(tl.float32)), axis=0))
        largest = tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32)))
        rotated_scale = _scale(tl.max(largest, axis=0))
        tl.store(p_latent_scale + i_scale, latent_scale)
        tl.store(p_rotated_scale + i_scale, rotated_scale)
        latent = _whole(latent, latent_scale)
        first, second = _whole(first, rotated_scale), _whole(second, rotated_scale)
    p_target = p_cache + block * cache_block + place * cache_place
    tl.store(p_target + i_latent, kept(latent, p_target), mask=m_latent)
    tl.store(p_target + LATENT + i_pair, kept(first, p_target), mask=m_pair)
    tl.store(p_target + LATENT + PAIRS + i_pair, kept(second, p_target), mask=m_pair)


@triton.jit
def _normed(p_row, p_weight, i_column, WIDTH: tl.constexpr, eps):
    """Return the normalised row, rounded before and after the weight as the models do; zeros beyond the width."""
    m_column = i_column < WIDTH
    x = tl.load(p_row + i_column, mask=m_column, other=0.0)
    x32 = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x32 * x32, axis=0) / WIDTH + eps)
    weight = tl.load(p_weight + i_column, mask=m_column, other=0.0)
    return ((x32 * factor).to(x.dtype) * weight).to(x.dtype)


@triton.jit
def _scale(largest):
    return tl.div_rn(tl.where(largest > 0, largest, 1.0), 127.0)


@triton.jit
def _whole(part, scale):
    """Return the nearest integer multiples of the scale."""
    return tl.floor(tl.div_rn(part.to(tl.float32), scale) + 0.5).to(tl.int8)


def compile_cases() -> list[CompileCase]:
    """Return the cases of DeepSeek-V3's row and of V2-Lite's, whose queries have no latent row, in 16 and 8 bits."""
    types = dict.fromkeys(("p_x", "p_out", "p_cache"), "*bf16") | {"eps": "fp32"}
    types |= dict.fromkeys(
        ("p_latent_norm", "p_query_norm", "p_cos", "p_sin", "p_latent_scale", "p_rotated_scale"), "*fp32"
    )
    types |= dict.fromkeys(("p_positions", "p_slots"), "*i64")
    types |= dict.fromkeys(("x_stride", "cache_block", "cache_place", "places"), "i32")
    unscaled = ("p_latent_scale", "p_rotated_scale")
    variants: dict[str, tuple[int, bool, str, tuple[str, ...], tuple[str, ...]]] = {
        "deepseek_v3": (1536, True, "*bf16", unscaled, ()),
        "deepseek_v2-lite": (3072, False, "*bf16", ("p_out", "p_query_norm", *unscaled), ()),
        "fp8": (1536, True, "*fp8e4nv", unscaled, ("sm_90", "sm_100")),
        "int8": (1536, True, "*i8", (), ()),
    }
    cases = []
    for name, (query_width, normed, cache, absent, only) in variants.items():
        constants = _shape(query_width, 512, 32, normed=normed)
        warps = constants.pop("num_warps")
        signature = types | {"p_cache": cache}
        cases.append(
            CompileCase(name, _latent_input, signature, constants | dict.fromkeys(absent), num_warps=warps, only=only)
        )
    return cases

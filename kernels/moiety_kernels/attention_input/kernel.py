"""Preparation of queries, keys and values for attention in Triton, in one launch.

Each program handles some heads of one token.

T tokens, C fused width, H query heads, G key-value heads, d head width, N blocks, P slots per block, R rotated pairs. A
head is held in three parts: the first of each rotated pair, the second, and the part that is not rotated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moiety_kernels.attention_input.kernels.parts import clamped, scaled_by, squares_of
from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.rope.inputs import RotaryInputs

if TYPE_CHECKING:
    from moiety_kernels.attention_input.plan import AttentionInputPlan
    from moiety_kernels.kv_store.caches import LayerCache

_VALUES = 1024  # per program; each of its two warps reads 16 bytes per thread at once
MAX_VALUES = 32768  # values that fit in the registers of 16 warps
_NONE, _OF_HEAD, _OF_ROW = "none", "head", "row"  # what is normalised together


def fits(x_THd: Tensor, cos_PR: Tensor) -> bool:
    """Return whether the table can rotate heads of this layout."""
    return x_THd.stride(-1) == 1 and cos_PR.is_contiguous() and triton.next_power_of_2(x_THd.shape[-1]) <= MAX_VALUES


def fits_plan(plan: AttentionInputPlan) -> bool:
    """Return whether the kernel supports the width that the plan normalises at once."""
    return plan.q_norm is None or triton.next_power_of_2(plan.q_norm.shape[0]) <= MAX_VALUES


def attention_input(
    qkv_TC: Tensor, plan: AttentionInputPlan, rotary: RotaryInputs, cache: LayerCache, slots_T: Tensor
) -> Tensor:
    """Return the queries q_THd and write keys and values to their slots; a negative slot writes nothing."""
    fused = qkv_TC.shape[1]
    _, num_kv_heads, _, width = cache.k_NGPd.shape
    v_width = cache.v_NGPd.shape[3]
    widths = [fused - num_kv_heads * (width + v_width), num_kv_heads * width, num_kv_heads * v_width]
    q_TC, k_TC, v_TC = torch.split(qkv_TC, widths, dim=1)
    q_THd, k_TGd, v_TGd = (
        q_TC.view(-1, widths[0] // width, width),
        k_TC.view(-1, num_kv_heads, width),
        v_TC.view(-1, num_kv_heads, v_width),
    )
    out_THd = torch.empty(q_THd.shape, dtype=qkv_TC.dtype, device=qkv_TC.device)
    _launch(q_THd, k_TGd, v_TGd, plan, rotary, out_THd, cache, slots_T)
    return out_THd


def rope(x_THd: Tensor, cos_PR: Tensor, sin_PR: Tensor, positions_T: Tensor) -> Tensor:
    """Return x with the pairs (i, i + R) of its heads rotated; x's heads may lie anywhere, each head contiguous."""
    out_THd = torch.empty(x_THd.shape, dtype=x_THd.dtype, device=x_THd.device)
    _launch(x_THd, None, None, None, RotaryInputs(cos_PR, sin_PR, positions_T), out_THd, None, None)
    return out_THd


def kv_store(k_TGd: Tensor, v_TGd: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
    """Write keys and values unchanged to their slots; a negative slot writes nothing."""
    _launch(None, k_TGd, v_TGd, None, None, None, cache, slots_T)


def _launch(
    q_THd: Tensor | None,
    k_TGd: Tensor | None,
    v_TGd: Tensor | None,
    plan: AttentionInputPlan | None,
    rotary: RotaryInputs | None,
    out_THd: Tensor | None,
    cache: LayerCache | None,
    slots_T: Tensor | None,
) -> None:
    """Launch programs for the heads that are given and omit the others."""
    some = q_THd if q_THd is not None else k_TGd
    assert some is not None
    heads = 0 if q_THd is None else q_THd.shape[1]
    kv_heads = 0 if k_TGd is None else k_TGd.shape[1]
    pairs = 0 if rotary is None else rotary.cos_PR.shape[1]
    shape = _shape(heads, kv_heads, some.shape[2], pairs, _norm(plan, some))
    v_norm = None if plan is None else plan.v_norm
    if v_TGd is not None:
        shape |= _value_shape(v_TGd.shape[2], shape, normalized=v_norm is not None)
    q_programs = triton.cdiv(heads, shape["Q_HEADS"])
    programs = q_programs + 2 * triton.cdiv(kv_heads, shape["KV_HEADS"])
    if some.numel() == 0:
        return
    q_norm, k_norm, eps, clip = (None, None, 0.0, None) if plan is None else _settings(plan)
    cos_PR, sin_PR, positions_T = rotary or (None,) * 3
    k_cache, v_cache, *scales = (None,) * 4 if cache is None else _tensors(cache)
    _attention_input[(some.shape[0], programs)](
        q_THd,
        k_TGd,
        v_TGd,
        q_norm,
        k_norm,
        v_norm,
        cos_PR,
        sin_PR,
        positions_T,
        out_THd,
        k_cache,
        v_cache,
        *scales,
        slots_T,
        *_strides(q_THd, 2),
        *_strides(k_TGd, 2),
        *_strides(v_TGd, 2),
        *_strides(out_THd, 2),
        *_strides(k_cache, 3),
        *_strides(v_cache, 3),
        heads,
        kv_heads,
        1 if k_cache is None else k_cache.shape[2],
        eps,
        0.0 if clip is None else clip,
        **shape,
        CLIP=clip is not None,
        ROTATES_FIRST=plan is not None and plan.rotates_first,
    )


def _tensors(cache: LayerCache) -> tuple[Tensor | None, ...]:
    return cache.k_NGPd, cache.v_NGPd, cache.k_scale_NGP, cache.v_scale_NGP


def _settings(plan: AttentionInputPlan) -> tuple[Tensor | None, Tensor | None, float, float | None]:
    return plan.q_norm, plan.k_norm, plan.norm_eps, plan.clip


def _norm(plan: AttentionInputPlan | None, x_THd: Tensor) -> str:
    if plan is None or plan.q_norm is None:
        return _NONE
    return _OF_HEAD if plan.q_norm.shape[0] == x_THd.shape[2] else _OF_ROW


def _strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if tensor is None else tensor.stride()[:count]


def _shape(heads: int, kv_heads: int, width: int, pairs: int, norm: str) -> dict[str, Any]:
    """Return the launch constants: heads per program to fill _VALUES, or all heads if normalised together."""
    block = triton.next_power_of_2(width)

    def rows(count: int) -> int:
        most: int = triton.next_power_of_2(max(1, count))
        return most if norm == _OF_ROW else min(most, max(1, _VALUES // block))

    values = block * max(rows(heads), rows(kv_heads))
    return {
        "Q_HEADS": rows(heads),
        "KV_HEADS": rows(kv_heads),
        "WIDTH": width,
        "PAIRS": pairs,
        "PAIRS_BLOCK": triton.next_power_of_2(max(1, pairs)),
        "REST_BLOCK": triton.next_power_of_2(max(1, width - 2 * pairs)),
        "NORM": norm,
        "num_warps": max(1, min(16, values // 512)),
    } | _value_shape(width, {"WIDTH": width, "PAIRS": pairs}, normalized=False)


def _value_shape(width: int, of_keys: dict[str, Any], *, normalized: bool) -> dict[str, Any]:
    """Return the launch constants of values, which are held in the parts of keys if they are as wide."""
    pairs = of_keys["PAIRS"] if width == of_keys["WIDTH"] else 0
    return {
        "V_WIDTH": width,
        "V_PAIRS": pairs,
        "V_PAIRS_BLOCK": triton.next_power_of_2(max(1, pairs)),
        "V_REST_BLOCK": triton.next_power_of_2(max(1, width - 2 * pairs)),
        "V_NORM": _OF_HEAD if normalized else _NONE,
    }


@triton.jit
def _attention_input(
    p_q,
    p_k,
    p_v,
    p_q_norm,
    p_k_norm,
    p_v_norm,
    p_cos,
    p_sin,
    p_positions,
    p_out,
    p_k_cache,
    p_v_cache,
    p_k_scale,
    p_v_scale,
    p_slots,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    k_block,
    k_cache_head,
    k_place,
    v_block,
    v_cache_head,
    v_place,
    heads,
    kv_heads,
    places,
    eps,
    clip,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_PAIRS: tl.constexpr,
    V_PAIRS_BLOCK: tl.constexpr,
    V_REST_BLOCK: tl.constexpr,
    V_NORM: tl.constexpr,
    CLIP: tl.constexpr,
    ROTATES_FIRST: tl.constexpr,
):
    """Process the heads of one token.

    The first programs of a token have Q_HEADS queries each, then come the programs for keys, then those for values.
    """
    i_token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    q_programs = tl.cdiv(heads, Q_HEADS)
    kv_programs = tl.cdiv(kv_heads, KV_HEADS)
    if p_q is not None:  # noqa: SIM102 - this is decided when compiling, the next when running
        if program < q_programs:
            _heads(
                p_q + i_token * q_token, q_head, p_out + i_token * out_token, out_head, program, heads, heads,
                None, 0, p_q_norm, p_cos, p_sin, p_positions, i_token, eps, clip,
                Q_HEADS, WIDTH, PAIRS, PAIRS_BLOCK, REST_BLOCK, NORM, CLIP, True, ROTATES_FIRST,
            )  # fmt: skip
    if p_k is not None:  # noqa: SIM102 - likewise
        if program >= q_programs:
            slot = tl.load(p_slots + i_token).to(tl.int64)
            block, place = slot // places, slot % places
            first_scale = block * kv_heads * places + place
            held = tl.where(slot < 0, 0, kv_heads)  # a token without a slot is not written
            if program < q_programs + kv_programs:
                _heads(
                    p_k + i_token * k_token, k_head, p_k_cache + block * k_block + place * k_place, k_cache_head,
                    program - q_programs, kv_heads, held,
                    None if p_k_scale is None else p_k_scale + first_scale, places,
                    p_k_norm, p_cos, p_sin, p_positions, i_token, eps, clip,
                    KV_HEADS, WIDTH, PAIRS, PAIRS_BLOCK, REST_BLOCK, NORM, CLIP, True, ROTATES_FIRST,
                )  # fmt: skip
            else:
                _heads(
                    p_v + i_token * v_token, v_head, p_v_cache + block * v_block + place * v_place, v_cache_head,
                    program - q_programs - kv_programs, kv_heads, held,
                    None if p_v_scale is None else p_v_scale + first_scale, places,
                    p_v_norm, p_cos, p_sin, p_positions, i_token, eps, clip,
                    KV_HEADS, V_WIDTH, V_PAIRS, V_PAIRS_BLOCK, V_REST_BLOCK, V_NORM, CLIP, False, False,
                )  # fmt: skip


@triton.jit
def _heads(
    p_source,
    source_head,
    p_target,
    target_head,
    program,
    heads,
    held,
    p_scale,
    scale_head,
    p_norm,
    p_cos,
    p_sin,
    p_positions,
    i_token,
    eps,
    clip,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    CLIP: tl.constexpr,
    ROTATE: tl.constexpr,
    ROTATES_FIRST: tl.constexpr,
):
    """Write HEADS of the `heads` at p_source to the target; only the first `held` heads are stored.

    With p_scale, each head is divided by its own scale, which is stored there.
    """
    i_head = program * HEADS + tl.arange(0, HEADS)
    p_row = p_source + i_head.to(tl.int64)[:, None] * source_head
    first, second, rest = _load(p_row, i_head, heads, WIDTH, PAIRS, PAIRS_BLOCK, REST_BLOCK)
    if ROTATES_FIRST and PAIRS > 0:
        first, second = _turned(first, second, p_cos, p_sin, p_positions, i_token, PAIRS, PAIRS_BLOCK)
    if NORM != "none":
        total = squares_of(first) + squares_of(second) + squares_of(rest)  # [HEADS]
        if NORM == "head":
            factor = tl.rsqrt(total / WIDTH + eps)[:, None]
            p_weight = p_norm + tl.zeros_like(i_head)[:, None]
        else:
            factor = tl.rsqrt(tl.sum(total, axis=0) / (WIDTH * heads) + eps)
            p_weight = p_norm + i_head[:, None] * WIDTH
        weights = _load(p_weight, i_head, heads, WIDTH, PAIRS, PAIRS_BLOCK, REST_BLOCK)
        first, second = scaled_by(first, factor, weights[0]), scaled_by(second, factor, weights[1])
        rest = scaled_by(rest, factor, weights[2])
    if CLIP:
        first, second, rest = clamped(first, clip), clamped(second, clip), clamped(rest, clip)
    if ROTATE and not ROTATES_FIRST and PAIRS > 0:
        first, second = _turned(first, second, p_cos, p_sin, p_positions, i_token, PAIRS, PAIRS_BLOCK)
    if p_scale is not None:
        largest = tl.maximum(tl.maximum(_largest(first), _largest(second)), _largest(rest))
        scale = tl.div_rn(tl.where(largest > 0, largest, 1.0), 127.0)
        tl.store(p_scale + i_head * scale_head, scale, mask=i_head < held)
        first, second, rest = (
            _whole(first, scale),
            _whole(second, scale),
            _whole(rest, scale),
        )
    p_row = p_target + i_head.to(tl.int64)[:, None] * target_head
    i_pair, i_rest = tl.arange(0, PAIRS_BLOCK)[None, :], tl.arange(0, REST_BLOCK)[None, :]
    m_pair, m_rest = (
        (i_head < held)[:, None] & (i_pair < PAIRS),
        (i_head < held)[:, None] & (i_rest < WIDTH - 2 * PAIRS),
    )
    tl.store(p_row + i_pair, kept(first, p_row), mask=m_pair)
    tl.store(p_row + PAIRS + i_pair, kept(second, p_row), mask=m_pair)
    tl.store(p_row + 2 * PAIRS + i_rest, kept(rest, p_row), mask=m_rest)


@triton.jit
def _turned(first, second, p_cos, p_sin, p_positions, i_token, PAIRS: tl.constexpr, PAIRS_BLOCK: tl.constexpr):
    """Return both entries of the rotated pairs of some heads, turned by the token's position."""
    i_pair = tl.arange(0, PAIRS_BLOCK)
    i_angle = tl.load(p_positions + i_token).to(tl.int64) * PAIRS + i_pair
    cos = tl.load(p_cos + i_angle, mask=i_pair < PAIRS, other=0.0)[None, :]
    sin = tl.load(p_sin + i_angle, mask=i_pair < PAIRS, other=0.0)[None, :]
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit
def kept(values, p_row):
    """Return the values, clamped to ±448 where the target is float8, which cannot represent more."""
    if p_row.dtype.element_ty == tl.float8e4nv:
        values = tl.clamp(values.to(tl.float32), -448.0, 448.0).to(tl.float8e4nv)
    return values


@triton.jit
def _largest(part):
    return tl.max(tl.abs(part.to(tl.float32)), axis=1)


@triton.jit
def _whole(part, scale):
    """Return the nearest integer multiples of the scale."""
    return tl.floor(tl.div_rn(part.to(tl.float32), scale[:, None]) + 0.5).to(tl.int8)


@triton.jit
def _load(
    p_row,
    i_head,
    heads,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Load the three parts of some heads, [heads, PAIRS_BLOCK] twice and [heads, REST_BLOCK], 0 outside the head."""
    i_pair, i_rest = tl.arange(0, PAIRS_BLOCK)[None, :], tl.arange(0, REST_BLOCK)[None, :]
    m_pair = (i_head < heads)[:, None] & (i_pair < PAIRS)
    m_rest = (i_head < heads)[:, None] & (i_rest < WIDTH - 2 * PAIRS)
    first = tl.load(p_row + i_pair, mask=m_pair, other=0.0)
    second = tl.load(p_row + PAIRS + i_pair, mask=m_pair, other=0.0)
    return first, second, tl.load(p_row + 2 * PAIRS + i_rest, mask=m_rest, other=0.0)


def compile_cases() -> list[CompileCase]:
    """Return the compile cases for the heads of known families.

    They are plain, normalised per head or all at once, clipped, partly rotated, and of widths that are not multiples of
    16 bytes; then the rotation alone and the store alone.
    """
    pointers = dict.fromkeys(("p_q", "p_k", "p_v", "p_out", "p_k_cache", "p_v_cache"), "*bf16")
    pointers |= dict.fromkeys(("p_q_norm", "p_k_norm", "p_v_norm", "p_cos", "p_sin", "p_k_scale", "p_v_scale"), "*fp32")
    pointers |= dict.fromkeys(("p_positions", "p_slots"), "*i64")
    numbers = [name for name in _attention_input.arg_names if name.islower() and not name.startswith("p_")]
    types = pointers | {name: "fp32" if name in ("eps", "clip") else "i32" for name in numbers}
    families: dict[str, tuple[int, int, int, int, str, bool]] = {
        "llama": (32, 8, 128, 64, _NONE, False),
        "qwen3_moe": (32, 4, 128, 64, _OF_HEAD, False),
        "olmoe": (16, 16, 128, 64, _OF_ROW, True),
        "widest row": (128, 128, 128, 64, _OF_ROW, False),
        "glm4_moe": (96, 8, 128, 32, _OF_HEAD, False),
        "phi": (32, 32, 80, 16, _NONE, False),
        "hunyuan_v1_moe": (32, 8, 128, 64, _OF_HEAD, False),
        "mimo_v2_flash": (64, 8, 192, 32, _NONE, False),
        "gemma4": (16, 2, 512, 256, _OF_HEAD, False),
        "rope": (128, 0, 64, 32, _NONE, False),
        "kv_store": (0, 8, 128, 0, _NONE, False),
        "int8": (32, 4, 128, 64, _OF_HEAD, False),
        "fp8": (32, 4, 128, 64, _OF_HEAD, False),
    }
    caches = {"int8": "*i8", "fp8": "*fp8e4nv"}
    cases = []
    for name, (heads, kv_heads, width, pairs, norm, clip) in families.items():
        constants = _shape(heads, kv_heads, width, pairs, norm)
        value_width = 128 if name == "mimo_v2_flash" else width
        constants |= _value_shape(value_width, constants, normalized=name == "gemma4") | {
            "CLIP": clip,
            "ROTATES_FIRST": name == "hunyuan_v1_moe",
        }
        warps = constants.pop("num_warps")
        absent: tuple[str, ...] = () if heads else ("p_q", "p_out", "p_cos", "p_sin", "p_positions")
        absent += () if kv_heads else ("p_k", "p_v", "p_k_cache", "p_v_cache", "p_slots")
        absent += () if norm != _NONE else ("p_q_norm", "p_k_norm")
        absent += () if name == "gemma4" else ("p_v_norm",)
        absent += () if name == "int8" else ("p_k_scale", "p_v_scale")
        constants |= dict.fromkeys(absent)
        kept_in = dict.fromkeys(("p_k_cache", "p_v_cache"), caches.get(name, "*bf16"))
        only = ("sm_90", "sm_100") if name == "fp8" else ()  # older GPUs have no float8, and AMD's float8 differs
        cases.append(CompileCase(name, _attention_input, types | kept_in, constants, num_warps=warps, only=only))
    return cases

"""Routing in Triton: the choice of experts, with few tokens and the grouping of their pairs in the same launch.

T tokens, K experts a token, E experts in G groups.
Inside a kernel experts lie in GP groups of SP, both powers of two, so that a column's order is its expert's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.route.groups import Groups
from moiety_kernels.route.kernels.grouping import MAX_EXPERTS, empty_groups, group_chosen, grouping_cases
from moiety_kernels.route.reference import TINY
from moiety_kernels.route.spec import RoutingSpec

_TOKENS = 4  # of one program
_MAX_AT_ONCE = 2048  # scores of all tokens that one program routes and groups
_CHANGING = ["num_tokens", "most_tiles"]  # with the step, for which nothing is compiled anew
_TINY = tl.constexpr(TINY)


def fits(logits_TE: Tensor) -> bool:
    """Whether `route` takes these logits."""
    return logits_TE.shape[1] <= MAX_EXPERTS and logits_TE.stride(1) == 1


def route(logits_TE: Tensor, spec: RoutingSpec, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weight_TK, expert_TK); of equal ranks the lower expert comes first, and a NaN comes last: so a token's experts
    are distinct ones whatever its logits are."""
    tokens = logits_TE.shape[0]
    weight_TK, expert_TK = _empty_choice(logits_TE, spec)
    if tokens:
        _route[(triton.cdiv(tokens, _TOKENS),)](
            logits_TE,
            bias_E,
            weight_TK,
            expert_TK,
            *(None,) * 4,
            *_numbers(logits_TE, spec, 0),
            **_constants(spec, bias_E),
            TOKENS=_TOKENS,
            TILE_ROWS=0,
            num_warps=4,
        )
    return weight_TK, expert_TK


def groups_too(logits_TE: Tensor, spec: RoutingSpec) -> bool:
    """Whether there are few enough tokens for `route_and_group`."""
    tokens, constants = logits_TE.shape[0], _constants(spec, None)
    columns = constants["GP"] * constants["SP"]
    return fits(logits_TE) and tokens > 0 and triton.next_power_of_2(tokens) * columns <= _MAX_AT_ONCE


def route_and_group(
    logits_TE: Tensor, spec: RoutingSpec, bias_E: Tensor | None, tile_rows: int
) -> tuple[Tensor, Tensor, Groups]:
    """What `route` and `group` return, in one launch of one program."""
    weight_TK, expert_TK = _empty_choice(logits_TE, spec)
    groups = empty_groups(expert_TK, spec.num_experts, tile_rows)
    _route[(1,)](
        logits_TE,
        bias_E,
        weight_TK,
        expert_TK,
        groups.order_R,
        groups.starts_E1,
        groups.tiles_N2,
        groups.num_tiles_1,
        *_numbers(logits_TE, spec, groups.tiles_N2.shape[0]),
        **_constants(spec, bias_E),
        TOKENS=triton.next_power_of_2(logits_TE.shape[0]),
        TILE_ROWS=tile_rows,
        num_warps=8,
    )
    return weight_TK, expert_TK, groups


def _empty_choice(logits_TE: Tensor, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    weight_TK = torch.empty(logits_TE.shape[0], spec.top_k, device=logits_TE.device)
    return weight_TK, torch.empty_like(weight_TK, dtype=torch.int32)


def _numbers(logits_TE: Tensor, spec: RoutingSpec, most: int) -> tuple[int | float, ...]:
    return logits_TE.shape[0], logits_TE.stride(0), most, spec.least_sum, spec.scale, spec.jitter


def _constants(spec: RoutingSpec, bias_E: Tensor | None) -> dict[str, Any]:
    return {
        "BIASED": bias_E is not None,
        "SCORING": spec.scoring,
        "RENORMALIZE": spec.renormalize,
        "TOP_K": spec.top_k,
        "TOP_GROUPS": spec.top_groups,
        "BEST_TWO": spec.group_score == "best_two",
        "G": spec.num_groups,
        "SIZE": spec.group_size,
        "KP": triton.next_power_of_2(spec.top_k),
        "GP": triton.next_power_of_2(spec.num_groups),
        "SP": triton.next_power_of_2(spec.group_size),
    }


@triton.jit(do_not_specialize=_CHANGING)
def _route(
    p_logits,
    p_bias,
    p_weight,
    p_expert,
    p_order,
    p_starts,
    p_tiles,
    p_num_tiles,
    num_tokens,
    stride,
    most_tiles,
    least_sum,
    scale,
    jitter,
    BIASED: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    G: tl.constexpr,
    SIZE: tl.constexpr,
    KP: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """With TILE_ROWS, the one program has all tokens and groups their pairs too."""
    i_token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    m_token = i_token < num_tokens
    i_column = tl.arange(0, GP * SP)
    i_expert = i_column // SP * SIZE + i_column % SP
    m_expert = (i_column // SP < G) & (i_column % SP < SIZE)
    i_row = tl.minimum(i_token, num_tokens - 1).to(tl.int64)  # a row too many is the last one again
    p_row = p_logits + i_row[:, None] * stride + i_expert[None, :]
    logits = tl.load(p_row, mask=m_expert[None, :], other=-float("inf")).to(tl.float32)  # [TOKENS, GP · SP]
    if SCORING == "softmax":
        powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = powers / tl.sum(powers, axis=1)[:, None]
    elif SCORING == "sigmoid":
        scores = 1 / (1 + tl.exp(-logits))
    else:
        scores = logits
    ranks = scores
    if BIASED:
        ranks += tl.load(p_bias + i_expert, mask=m_expert, other=0.0)[None, :]
    ranks = tl.where(m_expert[None, :] & (ranks > -float("inf")), ranks, -float("inf"))
    if G > 1:
        ranks = _of_best_groups(ranks, TOP_GROUPS, BEST_TWO, G, GP, SP)

    i_k = tl.arange(0, KP)
    weight = tl.zeros([TOKENS, KP], tl.float32)
    expert = tl.zeros([TOKENS, KP], tl.int32)
    turn = tl.zeros([TOKENS, GP * SP], tl.int32) + tl.where(m_expert, -1, TOP_K)[None, :]  # -1: not chosen yet
    for k in range(TOP_K):
        best = _best(ranks, turn == -1, i_column, GP * SP)
        hit = i_column[None, :] == best[:, None]
        own = tl.sum(tl.where(hit, scores, 0.0), axis=1)
        if SCORING == "sparse_mixer":
            size = tl.maximum(tl.abs(logits), own[:, None])
            near = (turn == -1) & ((own[:, None] - logits) / size <= 2 * jitter)
            own = 1 / tl.sum(tl.where(near | hit, tl.exp(logits - own[:, None]), 0.0), axis=1)
        weight = tl.where(i_k[None, :] == k, own[:, None], weight)
        expert = tl.where(i_k[None, :] == k, (best // SP * SIZE + best % SP)[:, None], expert)
        turn = tl.where(hit, k, turn)
    if SCORING == "softmax_chosen":
        weight = tl.exp(weight - tl.max(tl.where(i_k[None, :] < TOP_K, weight, -float("inf")), axis=1)[:, None])
        weight /= tl.sum(tl.where(i_k[None, :] < TOP_K, weight, 0.0), axis=1)[:, None]
    if RENORMALIZE:
        total = tl.sum(tl.where(i_k[None, :] < TOP_K, weight, 0.0), axis=1)
        weight /= tl.maximum(total + _TINY, least_sum)[:, None]
    i_pair = i_token.to(tl.int64)[:, None] * TOP_K + i_k[None, :]
    m_pair = m_token[:, None] & (i_k[None, :] < TOP_K)
    tl.store(p_weight + i_pair, weight * scale, mask=m_pair)
    tl.store(p_expert + i_pair, expert, mask=m_pair)
    if TILE_ROWS > 0:
        chosen = m_token[:, None] & m_expert[None, :] & (turn >= 0)
        pair = i_token[:, None] * TOP_K + turn
        group_chosen(
            chosen, pair, i_expert, m_expert, p_order, p_starts, p_tiles, p_num_tiles, most_tiles, G * SIZE, TILE_ROWS
        )


@triton.jit
def _of_best_groups(
    ranks,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
):
    """The ranks, and -inf for the experts of all but the best groups."""
    tokens: tl.constexpr = ranks.shape[0]
    grouped = tl.reshape(ranks, [tokens, GP, SP])
    score = tl.max(grouped, axis=2)  # [TOKENS, GP]
    if BEST_TWO:
        i_in = tl.arange(0, SP)[None, None, :]
        first = tl.min(tl.where(grouped == score[:, :, None], i_in, SP), axis=2)
        score += tl.max(tl.where(i_in == first[:, :, None], -float("inf"), grouped), axis=2)
    i_group = tl.arange(0, GP)
    free = tl.zeros([tokens, GP], tl.int32) + (i_group < G).to(tl.int32)[None, :]
    kept = tl.zeros([tokens, GP], tl.int32)
    for _ in range(TOP_GROUPS):
        hit = i_group[None, :] == _best(score, free == 1, i_group, GP)[:, None]
        kept = tl.where(hit, 1, kept)
        free = tl.where(hit, 0, free)
    return tl.reshape(tl.where(kept[:, :, None] == 1, grouped, -float("inf")), [tokens, GP * SP])


@triton.jit
def _best(ranks, free, i_column, END: tl.constexpr):
    """A row's free column of highest rank, the lowest of equals; there is one as long as any is free."""
    highest = tl.max(tl.where(free, ranks, -float("inf")), axis=1)
    return tl.min(tl.where(free & (ranks == highest[:, None]), i_column[None, :], END), axis=1)


def compile_cases() -> list[CompileCase]:
    """The routings of known families, alone and, of few tokens, with the grouping; then the grouping alone."""
    families = {
        "qwen3_moe": RoutingSpec(128, 8, renormalize=True),
        "qwen3_next": RoutingSpec(512, 10, renormalize=True),
        "deepseek_v2": RoutingSpec(160, 6, renormalize=False, num_groups=8, top_groups=3, scale=16.0),
        "deepseek_v3": RoutingSpec(256, 8, True, "sigmoid", 8, 4, "best_two", scale=2.5),
        "gpt_oss": RoutingSpec(32, 4, renormalize=False, scoring="softmax_chosen"),
        "phimoe": RoutingSpec(16, 2, renormalize=False, scoring="sparse_mixer", jitter=0.01),
    }
    integers = dict.fromkeys(("p_expert", "p_order", "p_starts", "p_tiles", "p_num_tiles"), "*i32")
    types = integers | {"p_logits": "*bf16", "p_bias": "*fp32", "p_weight": "*fp32"}
    types |= dict.fromkeys(("num_tokens", "stride", "most_tiles"), "i32")
    types |= dict.fromkeys(("least_sum", "scale", "jitter"), "fp32")
    odd = frozenset(_CHANGING)
    cases = []
    for name, spec in families.items():
        shape = _constants(spec, None) | {"BIASED": spec.scoring == "sigmoid"}
        most_tokens = _MAX_AT_ONCE // (shape["GP"] * shape["SP"])
        alone, grouped = {"TOKENS": _TOKENS, "TILE_ROWS": 0}, {"TOKENS": most_tokens, "TILE_ROWS": 16}
        cases.append(CompileCase(f"route {name}", _route, types, shape | alone, num_warps=4, unaligned=odd))
        cases.append(CompileCase(f"route and group {name}", _route, types, shape | grouped, num_warps=8, unaligned=odd))
    return cases + grouping_cases()

"""Expert choice in Triton; `kernels.grouping` groups the pairs.

T tokens, K experts per token, E experts in G groups. Inside a kernel experts lie in GP groups of SP, both powers of
two, so that columns have the order of their experts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.route.kernels.grouping import MAX_EXPERTS, grouping_cases
from moiety_kernels.route.spec import RoutingSpec

_TOKENS = 4  # per program
_CHANGING = ["num_tokens"]  # varies per step without recompilation


def fits(logits_TE: Tensor) -> bool:
    """Return whether `route` supports these logits."""
    return logits_TE.shape[1] <= MAX_EXPERTS and logits_TE.stride(1) == 1


def route(logits_TE: Tensor, spec: RoutingSpec, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (weight_TK, expert_TK); of equal ranks the lower expert comes first, and NaN comes last.

    So a token's experts are distinct whatever its logits are.
    """
    tokens = logits_TE.shape[0]
    weight_TK = torch.empty(tokens, spec.top_k, device=logits_TE.device)
    expert_TK = torch.empty_like(weight_TK, dtype=torch.int32)
    if tokens:
        _route[(triton.cdiv(tokens, _TOKENS),)](
            logits_TE,
            bias_E,
            weight_TK,
            expert_TK,
            tokens,
            logits_TE.stride(0),
            spec.added_sum,
            spec.least_sum,
            spec.scale,
            spec.jitter,
            **_constants(spec, bias_E),
            TOKENS=_TOKENS,
            num_warps=4,
        )
    return weight_TK, expert_TK


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
    num_tokens,
    stride,
    added_sum,
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
):
    i_token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    m_token = i_token < num_tokens
    i_column = tl.arange(0, GP * SP)
    i_expert = i_column // SP * SIZE + i_column % SP
    m_expert = (i_column // SP < G) & (i_column % SP < SIZE)
    i_row = tl.minimum(i_token, num_tokens - 1).to(tl.int64)  # a surplus row repeats the last one
    p_row = p_logits + i_row[:, None] * stride + i_expert[None, :]
    logits = tl.load(p_row, mask=m_expert[None, :], other=-float("inf")).to(tl.float32)  # [TOKENS, GP · SP]
    if SCORING == "softmax":
        powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = powers / tl.sum(powers, axis=1)[:, None]
    elif SCORING == "sigmoid":
        scores = 1 / (1 + tl.exp(-logits))
    elif SCORING == "sqrt_softplus":
        scores = tl.sqrt(_softplus(logits))
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
    free = tl.zeros([TOKENS, GP * SP], tl.int32) + m_expert.to(tl.int32)[None, :]
    for k in range(TOP_K):
        best = _best(ranks, free == 1, i_column, GP * SP)
        hit = i_column[None, :] == best[:, None]
        own = tl.sum(tl.where(hit, scores, 0.0), axis=1)
        if SCORING == "sparse_mixer":
            size = tl.maximum(tl.abs(logits), own[:, None])
            near = (free == 1) & ((own[:, None] - logits) / size <= 2 * jitter)
            own = 1 / tl.sum(tl.where(near | hit, tl.exp(logits - own[:, None]), 0.0), axis=1)
        weight = tl.where(i_k[None, :] == k, own[:, None], weight)
        expert = tl.where(i_k[None, :] == k, (best // SP * SIZE + best % SP)[:, None], expert)
        free = tl.where(hit, 0, free)
    if SCORING == "sigmoid_chosen":
        weight = 1 / (1 + tl.exp(-weight))
    if SCORING == "softmax_chosen":
        weight = tl.exp(weight - tl.max(tl.where(i_k[None, :] < TOP_K, weight, -float("inf")), axis=1)[:, None])
        weight /= tl.sum(tl.where(i_k[None, :] < TOP_K, weight, 0.0), axis=1)[:, None]
    if RENORMALIZE:
        total = tl.sum(tl.where(i_k[None, :] < TOP_K, weight, 0.0), axis=1)
        weight /= tl.maximum(total + added_sum, least_sum)[:, None]
    i_pair = i_token.to(tl.int64)[:, None] * TOP_K + i_k[None, :]
    m_pair = m_token[:, None] & (i_k[None, :] < TOP_K)
    tl.store(p_weight + i_pair, weight * scale, mask=m_pair)
    tl.store(p_expert + i_pair, expert, mask=m_pair)


@triton.jit
def _softplus(x):
    """Return max(x, 0) + log(1 + e^-|x|), with the digits of e^-|x| that the sum with 1 loses."""
    power = tl.exp(-tl.abs(x))
    above = 1 + power
    small = tl.where(above == 1, power, tl.log(above) * (power / tl.maximum(above - 1, 1e-30)))
    return tl.maximum(x, 0.0) + small


@triton.jit
def _of_best_groups(
    ranks,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
):
    """Return the ranks, with -inf for the experts of all but the best groups."""
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
    """Return a row's free column of highest rank, the lowest of equals; one exists as long as any is free."""
    highest = tl.max(tl.where(free, ranks, -float("inf")), axis=1)
    return tl.min(tl.where(free & (ranks == highest[:, None]), i_column[None, :], END), axis=1)


def compile_cases() -> list[CompileCase]:
    """Return the cases for the routings of known families, then those for grouping."""
    families = {
        "qwen3_moe": RoutingSpec(128, 8, renormalize=True),
        "qwen3_next": RoutingSpec(512, 10, renormalize=True),
        "deepseek_v2": RoutingSpec(160, 6, renormalize=False, num_groups=8, top_groups=3, scale=16.0),
        "deepseek_v3": RoutingSpec(256, 8, True, "sigmoid", 8, 4, "best_two", scale=2.5),
        "gpt_oss": RoutingSpec(32, 4, renormalize=False, scoring="softmax_chosen"),
        "deepseek_v4": RoutingSpec(256, 6, renormalize=True, scoring="sqrt_softplus", scale=1.5),
        "kolibri1": RoutingSpec(384, 6, renormalize=False, scoring="sigmoid_chosen"),
        "phimoe": RoutingSpec(16, 2, renormalize=False, scoring="sparse_mixer", jitter=0.01),
    }
    types = {"p_logits": "*bf16", "p_bias": "*fp32", "p_weight": "*fp32", "p_expert": "*i32"}
    types |= dict.fromkeys(("num_tokens", "stride"), "i32")
    types |= dict.fromkeys(("added_sum", "least_sum", "scale", "jitter"), "fp32")
    odd = frozenset(_CHANGING)
    cases = []
    for name, spec in families.items():
        shape = _constants(spec, None) | {"BIASED": spec.scoring.startswith(("sigmoid", "sqrt")), "TOKENS": _TOKENS}
        cases.append(CompileCase(f"route {name}", _route, types, shape, num_warps=4, unaligned=odd))
    return cases + grouping_cases()

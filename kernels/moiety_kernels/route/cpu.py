"""Top-k routing on a CPU. T tokens, E experts, K experts per token.

Each thread keeps in scratch memory a token's scores, the ranks that choose experts (the scores where there is no bias)
and its groups' scores. A rank of minus infinity marks an expert that is excluded or already chosen.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import load_f32, load_i32, store_f32, store_i32
from moiety_kernels.cpu.structs import Address, Float64, Int64, address_of
from moiety_kernels.cpu.team import SCRATCH_BYTES, team

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.route.spec import RoutingSpec

_BLOCK = 64  # tokens per task
_SOFTMAX, _SIGMOID, _SOFTMAX_CHOSEN, _SPARSE_MIXER, _SIGMOID_CHOSEN, _SQRT_SOFTPLUS = range(6)
_LINEAR = 20.0  # softplus(x) is x from here on, as in torch
_SCORINGS = {
    "softmax": _SOFTMAX,
    "sigmoid": _SIGMOID,
    "sigmoid_chosen": _SIGMOID_CHOSEN,
    "softmax_chosen": _SOFTMAX_CHOSEN,
    "sqrt_softplus": _SQRT_SOFTPLUS,
    "sparse_mixer": _SPARSE_MIXER,
}


class RouteArguments(NamedTuple):
    """Arguments of the choice of experts for T tokens."""

    logits_TE: Address  # float32, contiguous
    weight_TK: Address  # float32
    expert_TK: Address  # int32
    bias_E: Address  # float32, added to scores for the choice alone, or 0
    tokens: Int64  # T
    experts: Int64  # E
    top_k: Int64  # K
    scoring: Int64
    renormalize: Int64
    num_groups: Int64
    top_groups: Int64
    best_two: Int64  # whether a group's score is the sum of its two best
    is_chosen: Int64  # whether expert_TK is an input
    added_sum: Float64
    least_sum: Float64
    scale: Float64
    jitter: Float64


def fits(logits_TE: Tensor, spec: RoutingSpec, bias_E: Tensor | None) -> bool:
    """Return whether `route` supports these logits."""
    return (
        logits_TE.dtype is torch.float32
        and logits_TE.is_contiguous()
        and logits_TE.shape[0] > 0
        and (bias_E is None or bias_E.is_contiguous())
        and 4 * (2 * spec.num_experts + spec.num_groups) < SCRATCH_BYTES
    )


def route(logits_TE: Tensor, spec: RoutingSpec, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (weight_TK, expert_TK); of equal scores the lower expert comes first."""
    expert_TK = torch.empty(logits_TE.shape[0], spec.top_k, dtype=torch.int32)
    return _run(logits_TE, spec, bias_E, expert_TK, is_chosen=False), expert_TK


def weigh_experts(logits_TE: Tensor, expert_TK: Tensor, spec: RoutingSpec) -> Tensor:
    """Return weight_TK of experts that are chosen already."""
    return _run(logits_TE, spec, None, expert_TK, is_chosen=True)


def _run(logits_TE: Tensor, spec: RoutingSpec, bias_E: Tensor | None, expert_TK: Tensor, *, is_chosen: bool) -> Tensor:
    """Return weight_TK, and write expert_TK unless it is chosen already."""
    tokens = logits_TE.shape[0]
    weight_TK = torch.empty(tokens, spec.top_k)
    team().run(
        _task,
        -(-tokens // _BLOCK),
        RouteArguments(
            logits_TE=logits_TE.data_ptr(),
            weight_TK=weight_TK.data_ptr(),
            expert_TK=expert_TK.data_ptr(),
            bias_E=address_of(bias_E),
            tokens=tokens,
            experts=spec.num_experts,
            top_k=spec.top_k,
            scoring=_SCORINGS[spec.scoring],
            renormalize=spec.renormalize,
            num_groups=spec.num_groups,
            top_groups=spec.top_groups,
            best_two=spec.group_score == "best_two",
            is_chosen=is_chosen,
            added_sum=spec.added_sum,
            least_sum=spec.least_sum,
            scale=spec.scale,
            jitter=spec.jitter,
        ),
    )
    return weight_TK


def _task(args: RouteArguments, task: int, scratch: int) -> None:
    tokens, experts, top_k = args.tokens, args.experts, args.top_k
    groups, scores = args.num_groups, scratch + 4 * experts
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        row = args.logits_TE + 4 * experts * t
        weights, chosen = args.weight_TK + 4 * top_k * t, args.expert_TK + 4 * top_k * t
        total = _score(args, row, experts, scratch, scores)
        if groups > 1 and not args.is_chosen:
            _keep_best_groups(args, experts // groups, groups, scratch, scores + 4 * experts)
        taken = _take(args, row, experts, scratch, scores, weights, chosen)
        if args.scoring == _SOFTMAX_CHOSEN:
            factor = 1.0 / taken
        elif args.renormalize:
            factor = 1.0 / max(taken / total + args.added_sum, args.least_sum) / total
        else:
            factor = 1.0 / total
        for k in range(top_k):
            store_f32(weights, k, load_f32(weights, k) * factor * args.scale)


@jit
def _score(args: RouteArguments, row: int, experts: int, ranks: int, scores: int) -> float:
    """Write each expert's score and rank; return the divisor of the scores, which are not divided yet."""
    scoring, bias_E, total = args.scoring, args.bias_E, 1.0
    if scoring == _SOFTMAX:
        largest, total = load_f32(row, 0), 0.0
        for e in range(1, experts):
            largest = max(largest, load_f32(row, e))
        for e in range(experts):
            score = math.exp(load_f32(row, e) - largest)
            total += score
            store_f32(scores, e, score)
    else:
        for e in range(experts):
            logit = load_f32(row, e)
            if scoring == _SIGMOID:
                logit = 1.0 / (1.0 + math.exp(-logit))
            elif scoring == _SQRT_SOFTPLUS:
                logit = math.sqrt(logit if logit > _LINEAR else math.log1p(math.exp(logit)))
            store_f32(scores, e, logit)
    for e in range(experts):
        score = load_f32(scores, e)
        store_f32(ranks, e, score / total + load_f32(bias_E, e) if bias_E else score)
    return total


@jit
def _keep_best_groups(args: RouteArguments, size: int, groups: int, ranks: int, group_scores: int) -> None:
    """Exclude the experts of all but the `top_groups` best groups; of equal groups the lower one wins."""
    top_groups, best_two = args.top_groups, args.best_two
    for g in range(groups):
        first = second = -math.inf
        for e in range(g * size, (g + 1) * size):
            rank = load_f32(ranks, e)
            if rank > first:
                first, second = rank, first
            elif rank > second:
                second = rank
        store_f32(group_scores, g, first + second if best_two else first)
    for g in range(groups):
        mine, better = load_f32(group_scores, g), 0
        for other in range(groups):
            score = load_f32(group_scores, other)
            better += score > mine or (score == mine and other < g)
        if better >= top_groups:
            for e in range(g * size, (g + 1) * size):
                store_f32(ranks, e, -math.inf)


@jit
def _take(args: RouteArguments, row: int, experts: int, ranks: int, scores: int, weights: int, chosen: int) -> float:
    """Choose the best experts; return the sum of their weights, which are not divided yet."""
    scoring, taken = args.scoring, 0.0
    for k in range(args.top_k):
        best = 0
        if args.is_chosen:
            best = load_i32(chosen, k)
        else:
            for e in range(1, experts):
                if load_f32(ranks, e) > load_f32(ranks, best):
                    best = e
        weight = load_f32(scores, best)
        store_i32(chosen, k, best)
        if scoring == _SOFTMAX_CHOSEN:
            weight = math.exp(weight - load_f32(scores, load_i32(chosen, 0)))
        elif scoring == _SIGMOID_CHOSEN:
            weight = 1.0 / (1.0 + math.exp(-weight))
        elif scoring == _SPARSE_MIXER:
            weight = _share_among_near(row, experts, ranks, best, 2 * args.jitter)
        taken += weight
        store_f32(weights, k, weight)
        store_f32(ranks, best, -math.inf)
    return taken


@jit
def _share_among_near(row: int, experts: int, ranks: int, best: int, distance: float) -> float:
    """Return the softmax weight of the best expert among the unchosen experts with logits near its own."""
    top, total = load_f32(row, best), 0.0
    for e in range(experts):
        logit = load_f32(row, e)
        if not (top - logit) / max(abs(logit), top) > distance:
            total += math.exp(load_f32(ranks, e) - top)
    return 1.0 / total

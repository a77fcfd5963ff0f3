"""Top-k routing on a CPU. T tokens, E experts, K experts a token."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu.compiling import task_address
from moiety_kernels.cpu.memory import load_f32, load_i64, store_f32, store_i32
from moiety_kernels.cpu.team import SCRATCH_BYTES, team

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.route.spec import RoutingSpec

_LAYOUT = struct.Struct("7q")
_BLOCK = 64  # tokens a task


def fits(logits_TE: Tensor) -> bool:
    """Whether `route` takes these logits."""
    tokens, experts = logits_TE.shape
    return logits_TE.dtype is torch.float32 and logits_TE.is_contiguous() and tokens > 0 and 4 * experts < SCRATCH_BYTES


def route(logits_TE: Tensor, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    """(weight_TK, expert_TK); of equal scores the lower expert comes first."""
    tokens = logits_TE.shape[0]
    weight_TK = torch.empty(tokens, spec.top_k)
    expert_TK = torch.empty(tokens, spec.top_k, dtype=torch.int32)
    pointers = logits_TE.data_ptr(), weight_TK.data_ptr(), expert_TK.data_ptr()
    numbers = tokens, spec.num_experts, spec.top_k, spec.renormalize
    team().run(task_address(_task), -(-tokens // _BLOCK), _LAYOUT, *pointers, *numbers)
    return weight_TK, expert_TK


def _task(args: int, task: int, scratch: int) -> None:
    logits, weights, chosen = load_i64(args, 0), load_i64(args, 1), load_i64(args, 2)
    tokens, experts, top_k, renormalize = load_i64(args, 3), load_i64(args, 4), load_i64(args, 5), load_i64(args, 6)
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        row = logits + 4 * experts * t
        largest = load_f32(row, 0)
        for e in range(1, experts):
            largest = max(largest, load_f32(row, e))
        total = 0.0
        for e in range(experts):
            score = math.exp(load_f32(row, e) - largest)
            total += score
            store_f32(scratch, e, score)
        taken = 0.0
        for k in range(top_k):
            best = 0
            for e in range(1, experts):
                if load_f32(scratch, e) > load_f32(scratch, best):
                    best = e
            score = load_f32(scratch, best)
            taken += score
            store_f32(weights, t * top_k + k, score / total)
            store_i32(chosen, t * top_k + k, best)
            store_f32(scratch, best, -1.0)
        if renormalize:
            for k in range(top_k):
                store_f32(weights, t * top_k + k, load_f32(weights, t * top_k + k) * (total / taken))

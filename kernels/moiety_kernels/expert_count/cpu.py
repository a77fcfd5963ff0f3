"""Expert counts on a CPU: each layer is one task, so that a replayed step pays almost nothing for it.

T tokens, K experts per token, L layers, E experts, S slots. Scratch memory marks the experts that were chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.memory import load_i32, load_i64, store_i32, store_i64
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.cpu.team import SCRATCH_BYTES, team

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class CountArguments(NamedTuple):
    """Arguments of the counts of one layer."""

    expert_TK: Address  # int32
    owner_T: Address  # int64, the slot of each token
    picks_E: Address  # int64 counts of slot 0
    active: Address  # int64, to which the number of chosen experts is added
    tokens: Int64  # T
    top_k: Int64  # K
    experts: Int64  # E
    slot_bytes: Int64  # from one slot's counts to the next


def fits(chosen: Sequence[Tensor], owner_T: Tensor, picks_SLE: Tensor) -> bool:
    """Return whether `count_picks` supports these choices."""
    return (
        all(expert_TK.dtype is torch.int32 and expert_TK.is_contiguous() for expert_TK in chosen)
        and owner_T.is_contiguous()
        and picks_SLE.is_contiguous()
        and 4 * picks_SLE.shape[2] < SCRATCH_BYTES
    )


def count_picks(chosen: Sequence[Tensor], owner_T: Tensor, picks_SLE: Tensor, active_L: Tensor) -> None:
    _, num_layers, num_experts = picks_SLE.shape
    for layer, expert_TK in enumerate(chosen):
        team().run(
            _task,
            1,
            CountArguments(
                expert_TK=expert_TK.data_ptr(),
                owner_T=owner_T.data_ptr(),
                picks_E=picks_SLE.data_ptr() + 8 * layer * num_experts,
                active=active_L.data_ptr() + 8 * layer,
                tokens=expert_TK.shape[0],
                top_k=expert_TK.shape[1],
                experts=num_experts,
                slot_bytes=8 * num_layers * num_experts,
            ),
        )


def _task(args: CountArguments, task: int, scratch: int) -> None:
    experts, top_k, active = args.experts, args.top_k, args.active
    for e in range(experts):
        store_i32(scratch, e, 0)
    num_hit = 0
    for t in range(args.tokens):
        owner = load_i64(args.owner_T, t)
        picks_E = args.picks_E + owner * args.slot_bytes
        for k in range(t * top_k, (t + 1) * top_k):
            expert = load_i32(args.expert_TK, k)
            store_i64(picks_E, expert, load_i64(picks_E, expert) + 1)
            if owner != 0 and load_i32(scratch, expert) == 0:
                store_i32(scratch, expert, 1)
                num_hit += 1
    store_i64(active, 0, load_i64(active, 0) + num_hit)

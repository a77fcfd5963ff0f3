"""Expert counts on a CPU: each layer is one task, so that a replayed step pays almost nothing for it.

T tokens, K experts per token, L layers, E experts, S slots. Scratch memory marks the experts that were chosen.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu.compiling import task_address
from moiety_kernels.cpu.memory import load_i32, load_i64, store_i32, store_i64
from moiety_kernels.cpu.team import SCRATCH_BYTES, team

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_LAYOUT = struct.Struct("8q")

# arguments; PICKS is the address of the layer's counts of slot 0, and slots are SLOT_BYTES apart
CHOSEN, OWNER, PICKS, ACTIVE, TOKENS, TOP_K, EXPERTS, SLOT_BYTES = 0, 1, 2, 3, 4, 5, 6, 7


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
            task_address(_task),
            1,
            _LAYOUT,
            expert_TK.data_ptr(),
            owner_T.data_ptr(),
            picks_SLE.data_ptr() + 8 * layer * num_experts,
            active_L.data_ptr() + 8 * layer,
            expert_TK.shape[0],
            expert_TK.shape[1],
            num_experts,
            8 * num_layers * num_experts,
        )


def _task(args: int, task: int, scratch: int) -> None:
    experts, top_k, active = load_i64(args, EXPERTS), load_i64(args, TOP_K), load_i64(args, ACTIVE)
    for e in range(experts):
        store_i32(scratch, e, 0)
    num_hit = 0
    for t in range(load_i64(args, TOKENS)):
        owner = load_i64(load_i64(args, OWNER), t)
        picks = load_i64(args, PICKS) + owner * load_i64(args, SLOT_BYTES)
        for k in range(t * top_k, (t + 1) * top_k):
            expert = load_i32(load_i64(args, CHOSEN), k)
            store_i64(picks, expert, load_i64(picks, expert) + 1)
            if owner != 0 and load_i32(scratch, expert) == 0:
                store_i32(scratch, expert, 1)
                num_hit += 1
    store_i64(active, 0, load_i64(active, 0) + num_hit)

"""Expert counts on a CPU: each layer is one task, so that a replayed step pays almost nothing for it.

T tokens, K experts per token, L layers, E experts, S slots, P parts, W words. Scratch memory has the number of tokens
and the share of a token of each expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import load_i32, load_i64, store_i32, store_i64
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.cpu.team import SCRATCH_BYTES, team
from moiety_kernels.expert_count.owners import PART_SHIFT, SLOT_BITS, SLOT_MASK, WEIGHT_MASK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_kernels.expert_count.sums import ExpertSums

_SCRATCH_OF_EXPERT = 12  # bytes: an int32 and an int64


class CountArguments(NamedTuple):
    """Arguments of the counts of one layer."""

    expert_TK: Address  # int32
    owner_T: Address  # int64, see `owners`
    picks_E: Address  # int64 counts of slot 0
    active: Address  # int64, to which the number of chosen experts is added
    weighted_E: Address  # int64
    bytes_P: Address  # int64
    bits_W: Address  # int64 words of part 0; 0 if bits are not wanted
    tokens: Int64  # T
    top_k: Int64  # K
    experts: Int64  # E
    with_weights: Int64  # experts that have bytes
    expert_bytes: Int64
    words: Int64  # W
    slot_bytes: Int64  # from one slot's counts to the next
    part_bytes: Int64  # from one part's words to the next


def fits(chosen: Sequence[Tensor], owner_T: Tensor, sums: ExpertSums) -> bool:
    """Return whether `count_picks` supports these choices."""
    return (
        all(expert_TK.dtype is torch.int32 and expert_TK.is_contiguous() for expert_TK in chosen)
        and owner_T.is_contiguous()
        and all(one is None or one.is_contiguous() for one in sums)
        and _SCRATCH_OF_EXPERT * sums.picks_SLE.shape[2] + 8 < SCRATCH_BYTES
    )


def count_picks(
    chosen: Sequence[Tensor], owner_T: Tensor, sums: ExpertSums, *, expert_bytes: int, num_with_weights: int
) -> None:
    _, num_layers, num_experts = sums.picks_SLE.shape
    num_words = 0 if sums.bits_PLW is None else sums.bits_PLW.shape[2]
    first_bits = 0 if sums.bits_PLW is None else sums.bits_PLW.data_ptr()
    owners, picks, active = owner_T.data_ptr(), sums.picks_SLE.data_ptr(), sums.active_L.data_ptr()
    weighted, num_bytes = sums.weighted_LE.data_ptr(), sums.bytes_P.data_ptr()
    for layer, expert_TK in enumerate(chosen):
        team().run(
            _task,
            1,
            CountArguments(
                expert_TK=expert_TK.data_ptr(),
                owner_T=owners,
                picks_E=picks + 8 * layer * num_experts,
                active=active + 8 * layer,
                weighted_E=weighted + 8 * layer * num_experts,
                bytes_P=num_bytes,
                bits_W=first_bits + 8 * layer * num_words,
                tokens=expert_TK.shape[0],
                top_k=expert_TK.shape[1],
                experts=num_experts,
                with_weights=num_with_weights,
                expert_bytes=expert_bytes,
                words=num_words,
                slot_bytes=8 * num_layers * num_experts,
                part_bytes=8 * num_layers * num_words,
            ),
        )


def _task(args: CountArguments, task: int, scratch: int) -> None:
    experts, top_k, active = args.experts, args.top_k, args.active
    for e in range(experts):
        store_i32(scratch, e, 0)
    num_hit = 0
    for t in range(args.tokens):
        owner = load_i64(args.owner_T, t)
        slot, weight = owner & SLOT_MASK, owner >> SLOT_BITS & WEIGHT_MASK
        picks_E = args.picks_E + slot * args.slot_bytes
        for k in range(t * top_k, (t + 1) * top_k):
            expert = load_i32(args.expert_TK, k)
            store_i64(picks_E, expert, load_i64(picks_E, expert) + 1)
            if slot != 0:
                num_tokens = load_i32(scratch, expert)
                store_i32(scratch, expert, num_tokens + 1)
                store_i64(args.weighted_E, expert, load_i64(args.weighted_E, expert) + weight)
                if num_tokens == 0:
                    num_hit += 1
    store_i64(active, 0, load_i64(active, 0) + num_hit)
    _charge_parts(args, scratch)


@jit
def _charge_parts(args: CountArguments, tokens_E: int) -> None:
    """Divide the bytes of each expert among its tokens, and set the bits of each part's last token.

    `tokens_E`: address of the number of tokens of each expert, followed by room for the share of a token.
    """
    experts, top_k, rest = args.experts, args.top_k, 0
    share_E = tokens_E + 4 * (experts + experts % 2)
    for e in range(experts):
        num_tokens = load_i32(tokens_E, e)
        if num_tokens > 0:
            has = args.expert_bytes if e < args.with_weights else 0
            store_i64(share_E, e, has // num_tokens)
            rest += has % num_tokens
    for t in range(args.tokens):
        owner = load_i64(args.owner_T, t)
        if owner & SLOT_MASK != 0:
            part, num_bytes = owner >> PART_SHIFT, rest
            rest = 0
            for k in range(t * top_k, (t + 1) * top_k):
                num_bytes += load_i64(share_E, load_i32(args.expert_TK, k))
            store_i64(args.bytes_P, part, load_i64(args.bytes_P, part) + num_bytes)
            if args.words > 0:
                _set_bits(args, t, args.bits_W + part * args.part_bytes)


@jit
def _set_bits(args: CountArguments, token: int, bits_W: int) -> None:
    for w in range(args.words):
        store_i64(bits_W, w, 0)
    for k in range(token * args.top_k, (token + 1) * args.top_k):
        expert = load_i32(args.expert_TK, k)
        store_i64(bits_W, expert >> 6, load_i64(bits_W, expert >> 6) | 1 << (expert & 63))

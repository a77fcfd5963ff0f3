"""Definition of expert counts, and their GPU implementation.

It runs a few operations for all layers together, without a host synchronisation. T tokens, K experts per token, L
layers, E experts, S slots, P parts, W words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moiety_kernels.expert_count.owners import PART_SHIFT, SLOT_BITS, SLOT_MASK, WEIGHT_MASK

if TYPE_CHECKING:
    from moiety_kernels.expert_count.sums import ExpertSums


def count_picks(
    chosen: Sequence[Tensor], owner_T: Tensor, sums: ExpertSums, *, expert_bytes: int, num_with_weights: int
) -> None:
    """Add 1 to picks[slot[t], l, e] and weight[t] to weighted[l, e] for each expert e chosen by token t in layer l.

    Also add to active[l] the number of experts that any token of a slot other than 0 chose, and their bytes to the
    parts of the tokens that chose them.
    """
    num_layers, num_experts = sums.picks_SLE.shape[1:]
    slot_T = owner_T & SLOT_MASK
    counts_T = (slot_T != 0).long()
    part_T = (owner_T >> PART_SHIFT) * counts_T
    first_L = torch.arange(num_layers, device=owner_T.device) * num_experts
    expert_LTK = torch.stack(tuple(chosen)).long()
    at_LTK = expert_LTK + first_L[:, None, None]
    index_R = (at_LTK + (slot_T * (num_layers * num_experts))[:, None]).flatten()
    sums.picks_SLE.view(-1).scatter_add_(0, index_R, torch.ones_like(index_R))
    counts_R = counts_T[:, None].expand(at_LTK.shape).flatten()
    weight_T = (owner_T >> SLOT_BITS & WEIGHT_MASK) * counts_T
    sums.weighted_LE.view(-1).scatter_add_(0, at_LTK.flatten(), weight_T[:, None].expand(at_LTK.shape).flatten())
    tokens_LE = torch.zeros(num_layers * num_experts, dtype=torch.int64, device=owner_T.device)
    tokens_LE.scatter_add_(0, at_LTK.flatten(), counts_R)
    is_active_LE = (tokens_LE > 0).view(num_layers, num_experts)
    sums.active_L.add_(is_active_LE.sum(dim=1))
    _add_bytes(at_LTK, part_T, counts_T, tokens_LE, sums.bytes_P, expert_bytes, num_with_weights)
    if sums.bits_PLW is not None:
        _set_bits(expert_LTK, owner_T, part_T, counts_T, sums.bits_PLW)


def _add_bytes(
    at_LTK: Tensor,
    part_T: Tensor,
    counts_T: Tensor,
    tokens_LE: Tensor,
    bytes_P: Tensor,
    expert_bytes: int,
    num_with_weights: int,
) -> None:
    """Divide the bytes of each active expert among its tokens; the remainders go to the first token that counts."""
    num_tokens = at_LTK.shape[1]
    if num_tokens == 0:
        return
    tokens = tokens_LE.view(at_LTK.shape[0], -1)
    has_weights_E = torch.arange(tokens.shape[1], device=tokens.device) < num_with_weights
    read_LE = torch.where((tokens > 0) & has_weights_E, expert_bytes, 0)
    share_LE = read_LE // tokens.clamp(min=1)
    rest = (read_LE - share_LE * tokens).sum()
    bytes_T = share_LE.view(-1)[at_LTK].sum(dim=(0, 2)) * counts_T
    place_T = torch.arange(num_tokens, device=tokens.device)
    first = torch.where(counts_T > 0, place_T, num_tokens - 1).min()
    bytes_P.scatter_add_(0, part_T, bytes_T + torch.where(place_T == first, rest, 0))


def _set_bits(expert_LTK: Tensor, owner_T: Tensor, part_T: Tensor, counts_T: Tensor, bits_PLW: Tensor) -> None:
    """Set the bits of the experts that the last token of each part chose, and clear the part's other bits."""
    num_layers, num_tokens, _ = expert_LTK.shape
    num_words = bits_PLW.shape[2]
    place_T = torch.where(counts_T > 0, torch.arange(num_tokens, device=owner_T.device), -1)
    last_P = torch.full((len(bits_PLW),), -1, dtype=torch.int64, device=owner_T.device)
    last_P.scatter_reduce_(0, part_T, place_T, "amax")
    is_last_T = (place_T >= 0) & (last_P[part_T] == place_T)
    bits_TLW = torch.zeros(num_tokens, num_layers, num_words, dtype=torch.int64, device=owner_T.device)
    word_TLK = (expert_LTK >> 6).permute(1, 0, 2)
    bits_TLW.scatter_add_(2, word_TLK, torch.ones_like(word_TLK) << (expert_LTK & 63).permute(1, 0, 2))
    # A part's last token writes its bits; the others add zero to the part's cleared row.
    bits_PLW.mul_((last_P < 0)[:, None, None])
    bits_PLW.index_add_(0, part_T, bits_TLW * is_last_T[:, None, None])

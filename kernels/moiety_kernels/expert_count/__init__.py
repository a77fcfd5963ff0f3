"""Counts of the experts that a pass chose, by the slots of the tokens' owners, and the bytes that each part read.

T tokens, K experts per token, L layers, E experts, S slots of owners, P parts of a step, W words of 64 bits.

The owner of a token is one number, so that one array per step names everything that the counts depend on
(`owner_code`): the slot of its tenant, the weight of the token in the weighted counts, and the part of the step that it
belongs to. Tokens of slot 0 belong to no request: they are not active, read no bytes and have no meaning in the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moiety_kernels.checks import require_shape
from moiety_kernels.expert_count import reference
from moiety_kernels.expert_count.owners import MAX_SLOTS, MAX_WEIGHT, PART_SHIFT, owner_code
from moiety_kernels.expert_count.sums import ExpertSums
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAX_SLOTS", "MAX_WEIGHT", "PART_SHIFT", "ExpertSums", "count_picks", "owner_code"]

_cpu = lazy_import(__name__, "cpu")


def count_picks(
    chosen: Sequence[Tensor], owner_T: Tensor, sums: ExpertSums, *, expert_bytes: int, num_with_weights: int
) -> None:
    """Add the experts that a pass chose to the sums.

    `chosen` has expert_TK, int32, of each layer; owner_T holds the owner of each token, int64. An active expert is read
    once: its `expert_bytes` are divided among the tokens that chose it, in whole bytes, and the remainders of a layer
    go to its first token. Experts from `num_with_weights` on have no bytes. The tokens of a part follow one another.
    """
    require_shape("owner", owner_T, (chosen[0].shape[0],))
    require_shape("picks", sums.picks_SLE, (-1, len(chosen), -1))
    require_shape("active", sums.active_L, (len(chosen),))
    require_shape("weighted", sums.weighted_LE, tuple(sums.picks_SLE.shape[1:]))
    is_cpu = sums.picks_SLE.is_cpu and _cpu().fits(chosen, owner_T, sums)
    count = _cpu().count_picks if is_cpu else reference.count_picks
    count(chosen, owner_T, sums, expert_bytes=expert_bytes, num_with_weights=num_with_weights)

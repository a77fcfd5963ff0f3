"""Counts of the experts that a pass chose, per slot of the tokens' owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moiety_kernels.checks import require_shape
from moiety_kernels.expert_count import reference
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

_cpu = lazy_import(__name__, "cpu")


def count_picks(chosen: Sequence[Tensor], owner_T: Tensor, picks_SLE: Tensor, active_L: Tensor) -> None:
    """Add the experts that a pass chose to the int64 counts.

    `chosen` has expert_TK, int32, of each layer; owner_T holds the slot of each token. Tokens of slot 0 do not count as
    active, and their counts have no meaning.
    """
    require_shape("owner", owner_T, (chosen[0].shape[0],))
    require_shape("picks", picks_SLE, (-1, len(chosen), -1))
    require_shape("active", active_L, (len(chosen),))
    if picks_SLE.is_cpu and _cpu().fits(chosen, owner_T, picks_SLE):
        _cpu().count_picks(chosen, owner_T, picks_SLE, active_L)
        return
    reference.count_picks(chosen, owner_T, picks_SLE, active_L)

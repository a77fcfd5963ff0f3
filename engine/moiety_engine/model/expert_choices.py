"""Gathering of the experts that a step's tokens chose on the first rank, from all rank groups and pipeline stages.

T tokens, L layers with experts, K experts of a token, C = L · K columns.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import torch

from moiety_engine.distribution.collectives import Present

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import PendingReceive, Ranks
    from moiety_engine.model.batch import Batch
    from moiety_engine.moe.load import ExpertCounter
    from moiety_engine.moe.shape import ExpertShape


def begin_count(
    chosen: Sequence[Tensor],
    batch: Batch,
    ranks: Ranks,
    experts: ExpertShape,
    counter: ExpertCounter,
    num_layers: int,
) -> Callable[[], None]:
    """Begin to gather the experts that all groups' tokens chose, in all stages, on the first rank.

    Return the function that waits for them and counts them there for all ranks. `chosen`: experts of this rank's
    tokens, [T, K] of each of its layers with experts. `num_layers`: of the whole model.
    """
    owner_T = batch.owner_T
    if batch.spread is None and ranks.pipeline.size == 1:
        return count_nothing if owner_T is None else partial(counter.count, chosen, owner_T)
    if ranks.rank_position.tp_rank:
        return count_nothing
    gathered = _begin_gather(chosen, batch, ranks, experts, num_layers)
    if ranks.rank_position.rank:
        return count_nothing

    def count() -> None:
        all_TC = gathered.wait()
        if owner_T is not None:
            counter.count([one.contiguous() for one in torch.split(all_TC, experts.top_k, dim=1)], owner_T)

    return count


def count_nothing() -> None:
    """Count no experts, since there are none or another rank counts them."""


def _begin_gather(
    chosen: Sequence[Tensor], batch: Batch, ranks: Ranks, experts: ExpertShape, num_layers: int
) -> PendingReceive[Tensor]:
    """Begin to gather the experts of all tokens, layer by layer, [T, C], on the first rank; a part on others."""
    none_TC = torch.empty(len(batch.token_ids_T), 0, dtype=torch.int32, device=batch.token_ids_T.device)
    all_TC = torch.cat([none_TC, *chosen], dim=1)
    if batch.spread is not None:
        all_TC = ranks.across.gather_rows(all_TC, batch.spread.num_tokens)
    if ranks.across.rank:
        return Present(all_TC)
    layout = ranks.rank_position.layout
    layers_of = Counter(layout.stage_of(layer, num_layers) for layer in experts.layers)
    return ranks.pipeline.begin_gather_columns(all_TC, [experts.top_k * layers_of[s] for s in range(layout.pp)])

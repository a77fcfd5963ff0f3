"""Gathering of the experts that a step's tokens chose on the first rank, from all rank groups and pipeline stages.

T tokens, L layers with experts, K experts of a token, C = L · K columns.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import Ranks
    from moiety_engine.model.batch import Batch
    from moiety_engine.moe.shape import ExpertShape


def gather_choices(
    chosen: Sequence[Tensor], batch: Batch, ranks: Ranks, experts: ExpertShape, num_layers: int
) -> Tensor:
    """Return the experts that all tokens chose, layer by layer, [T, C], on the first rank; a part of it on others.

    `chosen`: those of this rank's tokens, [T, K] of each of its layers with experts. `num_layers`: of the whole model.
    """
    none_TC = torch.empty(len(batch.token_ids_T), 0, dtype=torch.int32, device=batch.token_ids_T.device)
    all_TC = torch.cat([none_TC, *chosen], dim=1)
    if batch.spread is not None:
        all_TC = ranks.across.gather_rows(all_TC, batch.spread.num_tokens)
    if ranks.across.rank:
        return all_TC
    layout = ranks.rank_position.layout
    layers_of = Counter(layout.stage_of(layer, num_layers) for layer in experts.layers)
    return ranks.pipeline.gather_columns_of_stages(all_TC, [experts.top_k * layers_of[s] for s in range(layout.pp)])

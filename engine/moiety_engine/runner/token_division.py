"""Division of a step's tokens among ranks that have copies of one KV cache (prefill context parallelism).

L rows whose results are wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from moiety_engine.runner.micro_batches import cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moiety_engine.runner.inputs import HostBatch


def divide_tokens(host: HostBatch, num_ranks: int) -> tuple[list[HostBatch], np.ndarray]:
    """Return consecutive parts of a step with about the same number of rows, one for each rank, and their order.

    A chunk of a prompt may span several parts. The order has the index of each wanted row of the step among the
    concatenated wanted rows of the parts, int64. `owner_T` of the first part covers all tokens.
    """
    num_rows, wanted_L = len(host.token_ids_T), host.wanted_rows_L
    ends = np.array([num_rows * (i + 1) // num_ranks for i in range(num_ranks)])
    rank_L, rank_P = (np.searchsorted(ends, rows, side="right") for rows in (wanted_L, host.pending_rows_P))
    is_scored_L = np.arange(len(wanted_L)) >= len(wanted_L) - host.num_scored
    parts = []
    for rank, part in enumerate(cut(host, num_ranks)):
        first, own_L, own_P = ends[rank] - len(part.token_ids_T), rank_L == rank, rank_P == rank
        parts.append(
            replace(
                part,
                owner_T=host.owner_T if rank == 0 else part.owner_T,
                wanted_rows_L=wanted_L[own_L] - first,
                num_scored=int((own_L & is_scored_L).sum()),
                pending_rows_P=host.pending_rows_P[own_P] - first,
                sampled_rows_P=host.sampled_rows_P[own_P],
            )
        )
    order_L = np.empty(len(wanted_L), dtype=np.int64)
    order_L[np.argsort(rank_L, kind="stable")] = np.arange(len(wanted_L))
    return parts, order_L


def rank_slots_of(parts: Sequence[HostBatch]) -> list[list[np.ndarray]]:
    """Return the cache slots of each part's tokens, for each cache group. A part without tokens has none."""
    num_groups = 1 + max(len(part.further_tables) for part in parts)
    none = np.zeros(0, dtype=np.int64)
    further = (
        [part.further_tables[group].slots_T if part.further_tables else none for part in parts]
        for group in range(num_groups - 1)
    )
    return [[part.slots_T for part in parts], *further]

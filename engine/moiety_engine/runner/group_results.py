"""Parts of a step that concern all rank groups: the order of their results, and rows with adapters.

L rows whose results are wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from moiety_engine.model.batch import Spread
from moiety_engine.runner.inputs import scored_of

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.runner.inputs import HostBatch
    from moiety_engine.scheduling.plan import Chunk, Plan


def with_adapter_rows(hosts: list[HostBatch]) -> list[HostBatch]:
    """Return the batches with adapter slots in all groups if a token of any group has an adapter.

    Ranks of different groups send each other the adapter slots of tokens, and all must expect them.
    """
    if all(host.adapter_T is None for host in hosts):
        return hosts
    none = [np.full(len(host.token_ids_T), -1, dtype=np.int64) for host in hosts]
    return [
        replace(host, adapter_T=rows_T) if host.adapter_T is None else host
        for host, rows_T in zip(hosts, none, strict=True)
    ]


def order_of(plan: Plan, hosts: list[HostBatch]) -> np.ndarray:
    """Return the index of each wanted row of the step among the concatenated wanted rows of its groups.

    The rows of the step are in the order in which `BatchBuilder.arrange` puts them.
    """
    nexts = np.cumsum([0, *(len(host.wanted_rows_L) for host in hosts)]).tolist()
    order: list[int] = []
    for count_of in (_num_sampled, _num_embedded, _num_scored):
        for chunk in plan.chunks:
            group = chunk.sequence.kv.group
            first, nexts[group] = nexts[group], nexts[group] + count_of(chunk)
            order += range(first, nexts[group])
    return np.array(order, dtype=np.int64)


def spread_of(hosts: list[HostBatch], order_L: Tensor) -> Spread:
    """Return the numbers of tokens and of wanted rows per group, with the order of the wanted rows."""
    return Spread(
        tuple(len(host.token_ids_T) for host in hosts), tuple(len(host.wanted_rows_L) for host in hosts), order_L
    )


def _num_sampled(chunk: Chunk) -> int:
    return 1 + len(chunk.draft) if chunk.samples else 0


def _num_embedded(chunk: Chunk) -> int:
    return int(chunk.embeds)


def _num_scored(chunk: Chunk) -> int:
    found = scored_of(chunk)
    return 0 if found is None else len(found.token_ids)

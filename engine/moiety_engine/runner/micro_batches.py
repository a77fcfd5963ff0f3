"""A step's rows in micro-batches: while one's are with ranks that have the experts, another's are at attention.

T tokens of a group, S sequences.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from moiety_engine.runner.inputs import HostBatch

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class MicroBatchSplit:
    """Into how many micro-batches a step is cut: each is read the experts' weights for once more, so none is to have
    fewer tokens of the group with the most than `least_tokens`."""

    most: int = 1
    least_tokens: int = 1

    def count(self, hosts: list[HostBatch]) -> int:
        """The same for all groups of ranks, whatever they have of the step."""
        tokens = max(len(host.token_ids_T) for host in hosts)
        return max(1, min(self.most, tokens // self.least_tokens))


WHOLE = MicroBatchSplit()


def cutting_of(config: EngineConfig) -> MicroBatchSplit:
    """Where attention and experts have the same ranks, nothing waits for others, and nothing is cut."""
    return MicroBatchSplit(config.micro_batches, config.micro_batch_tokens) if config.ffn_ranks else WHOLE


def cut(host: HostBatch, count: int) -> list[HostBatch]:
    """As many parts of about the same number of rows each, one after the other, without what is wanted of them; none
    where there would be one. A sequence may lie across two: the second attends to what the first has stored."""
    if count == 1:
        return []
    num_rows = len(host.token_ids_T)
    ends = [num_rows * i // count for i in range(count + 1)]
    return [_part(host, first, end) for first, end in itertools.pairwise(ends)]


def _part(host: HostBatch, first: int, end: int) -> HostBatch:
    if first == end:
        return HostBatch.empty()
    starts = host.query_start_S1
    begin_s = int(np.searchsorted(starts, first, side="right")) - 1
    end_s = int(np.searchsorted(starts, end, side="left"))
    query_start = np.clip(starts[begin_s : end_s + 1], first, end) - first
    beyond = np.maximum(starts[begin_s + 1 : end_s + 1] - end, 0)  # rows of the last sequence that are of the next part
    context_len = host.context_len_S[begin_s:end_s] - beyond
    none = np.zeros(0, dtype=np.int64)
    return replace(
        host,
        token_ids_T=host.token_ids_T[first:end],
        positions_T=host.positions_T[first:end],
        slots_T=host.slots_T[first:end],
        owner_T=none,
        query_start_S1=query_start,
        context_len_S=context_len,
        block_table_SB=host.block_table_SB[begin_s:end_s],
        wanted_rows_L=none,
        num_scored=0,
        pending_rows_P=none,
        sampled_rows_P=none,
        num_decode=min(max(host.num_decode - begin_s, 0), end_s - begin_s),
        max_context=int(context_len.max()),
        max_query=int(np.diff(query_start).max()),
    )

"""Splitting of a step into micro-batches, for attention–FFN disaggregation and two-batch overlap.

While rows of one micro-batch are with or on their way to experts, the attention ranks compute another. A step that
sends KV to other engines is not split, because each layer's KV is sent once all rows of the step are stored.

T tokens of a group, S sequences.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec.structs import replace

from moiety_engine.runner.block_tables import HostTable
from moiety_engine.runner.inputs import HostBatch
from moiety_wire.engine_choices import TwoBatchOverlap

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig
    from moiety_engine.distribution.collectives import Ranks


@dataclass(frozen=True, slots=True)
class MicroBatchSplit:
    """Policy for the number of micro-batches of a step.

    Each micro-batch reads the experts' weights once more. Therefore no micro-batch may have fewer than `least_tokens`
    tokens, counted in the group with the most tokens. `least_decode_tokens`: the same for steps that only decode; None:
    no difference.
    """

    most: int = 1
    least_tokens: int = 1
    least_decode_tokens: int | None = None

    def count(self, hosts: list[HostBatch]) -> int:
        """Return the number of micro-batches of a step; it is the same for all rank groups."""
        if any(host.images is not None for host in hosts):
            return 1  # the rows of images are not split
        tokens = max(len(host.token_ids_T) for host in hosts)
        least = self.least_tokens
        if self.least_decode_tokens is not None and all(len(host.token_ids_T) == host.num_decode for host in hosts):
            least = self.least_decode_tokens
        return max(1, min(self.most, tokens // least))


WHOLE = MicroBatchSplit()


OVERLAP_DECODE_TOKENS, OVERLAP_TOKENS = 32, 512  # of a step in two halves on a GPU: the thresholds that vLLM has


class StepSplit(Protocol):
    """Policy for the number of micro-batches of a step."""

    def count(self, hosts: list[HostBatch]) -> int:
        """Return the number of micro-batches of a step; it is the same for all rank groups."""
        ...


@dataclass(frozen=True, slots=True)
class LayoutSplit:
    """Policies of a group whose experts can be on expert ranks, or on the ranks with attention."""

    ranks: Ranks
    with_expert_ranks: MicroBatchSplit
    without_expert_ranks: MicroBatchSplit

    def count(self, hosts: list[HostBatch]) -> int:
        """Return the number of micro-batches for the ranks that have the experts now."""
        return (self.with_expert_ranks if self.ranks.crossings else self.without_expert_ranks).count(hosts)


def cutting_of(config: EngineConfig, device_type: str, ranks: Ranks) -> LayoutSplit:
    """Return the configured policies; WHOLE where no rank waits for experts.

    On a CPU two-batch overlap is off unless it is configured: the processor carries the rows, so that nothing is idle
    meanwhile (`benchmarks/expert_parallel.py`). Ranks that divide the tokens of a step run it in one piece: a token can
    attend to those of the ranks before in any micro-batch.
    """
    with_expert_ranks = MicroBatchSplit(config.micro_batches, config.micro_batch_tokens)
    if config.prefill_context_parallel > 1:
        with_expert_ranks = WHOLE
    return LayoutSplit(ranks, with_expert_ranks, _overlapping(config, device_type))


def _overlapping(config: EngineConfig, device_type: str) -> MicroBatchSplit:
    choice = config.two_batch_overlap
    if config.dp_attention == 1 or choice is TwoBatchOverlap.OFF:
        return WHOLE
    if choice is TwoBatchOverlap.ON:
        return MicroBatchSplit(2)
    return MicroBatchSplit(2, OVERLAP_TOKENS // 2, OVERLAP_DECODE_TOKENS // 2) if device_type == "cuda" else WHOLE


def cut(host: HostBatch, count: int) -> list[HostBatch]:
    """Split a batch into consecutive parts of about the same number of rows; return no parts if `count` is 1.

    The parts have no wanted rows. A sequence may span two parts: the second part attends to the KV that the first
    stored.
    """
    if count == 1:
        return []
    num_rows = len(host.token_ids_T)
    ends = [num_rows * i // count for i in range(count + 1)]
    return [_part(host, first, end) for first, end in itertools.pairwise(ends)]


def _part(host: HostBatch, first: int, end: int) -> HostBatch:
    if first == end:
        return HostBatch.empty(has_adapters=host.adapter_T is not None)
    starts = host.query_start_S1
    begin_s = int(np.searchsorted(starts, first, side="right")) - 1
    end_s = int(np.searchsorted(starts, end, side="left"))
    query_start = np.clip(starts[begin_s : end_s + 1], first, end) - first
    beyond = np.maximum(starts[begin_s + 1 : end_s + 1] - end, 0)  # rows of the last sequence in the next part
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
        adapter_T=None if host.adapter_T is None else host.adapter_T[first:end],
        images=None if host.images is None else host.images.among(first, end),
        states=None if host.states is None else host.states.part(first, end),
        further_tables=tuple(
            HostTable(one.slots_T[first:end], one.block_table_SB[begin_s:end_s]) for one in host.further_tables
        ),
    )

"""CUDA graphs for decode steps, which avoid launching their kernels one by one.

A step in which every sequence decodes one token is captured as a CUDA graph for a number of sequences, and replayed for
that many or fewer: the batch is padded with dummy rows. A dummy row has one token at position 0 of a scratch block that
no sequence uses, reads only that block, and its output is discarded. Graphs are captured once, the largest first, and
share one memory pool, since only one runs at a time.

S sequences, B blocks a row, D model width.
"""

from __future__ import annotations

import bisect
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from moiety_engine.model.batch import Batch, GroupTable, KvCache
from moiety_engine.model.transformer import Transformer
from moiety_engine.moe.tenants import NO_TENANT
from moiety_engine.runner.block_tables import HostTable
from moiety_engine.runner.inputs import HostBatch, put_pending
from moiety_engine.staging import Staging

MIN_CONTEXT = 4096  # tokens; graphs are captured for the longest context, and for this shorter bound
_SMALL = (1, 2, 4)
_STEP, _WIDE_STEP, _WIDE_FROM = 8, 32, 64


def graph_sizes(max_running: int) -> list[int]:
    """Return the numbers of sequences to capture.

    Small sizes are closer together, so that short steps get little padding.
    """
    sizes = [*_SMALL, *range(_STEP, _WIDE_FROM, _STEP), *range(_WIDE_FROM, max_running, _WIDE_STEP), max_running]
    return sorted({size for size in sizes if size <= max_running})


def graph_contexts(max_context: int) -> list[int]:
    """Return the context bounds to capture: a kernel that splits the context's work does so by the bound."""
    return sorted({min(MIN_CONTEXT, max_context), max_context})


def padded(host: HostBatch, num_sequences: int, scratch_block: int, block_size: int) -> HostBatch:
    """Return a batch of decodes padded with dummy rows to `num_sequences`. The wanted rows stay the same."""
    more = num_sequences - host.num_decode

    def padded_table(given_SB: np.ndarray) -> np.ndarray:
        table_SB = np.zeros((num_sequences, given_SB.shape[1]), dtype=np.int32)
        table_SB[: host.num_decode] = given_SB
        table_SB[host.num_decode :, 0] = scratch_block
        return table_SB

    def longer(values: np.ndarray, filler: int) -> np.ndarray:
        return np.concatenate((values, np.full(more, filler, dtype=values.dtype)))

    return replace(
        host,
        token_ids_T=longer(host.token_ids_T, 0),
        positions_T=longer(host.positions_T, 0),
        slots_T=longer(host.slots_T, scratch_block * block_size),
        owner_T=longer(host.owner_T, NO_TENANT),
        query_start_S1=np.arange(num_sequences + 1, dtype=np.int32),
        context_len_S=longer(host.context_len_S, 1),
        block_table_SB=padded_table(host.block_table_SB),
        num_decode=num_sequences,
        further_tables=tuple(
            HostTable(longer(one.slots_T, scratch_block * block_size), padded_table(one.block_table_SB))
            for one in host.further_tables
        ),
    )


@dataclass(frozen=True, slots=True)
class _Captured:
    """Captured graph with its inputs."""

    graph: Any  # torch.cuda.CUDAGraph
    batch: Batch  # the graph's inputs, at fixed addresses


class DecodeGraphs:
    """The graphs of one model over one cache. Used by the step loop's thread only."""

    def __init__(
        self,
        model: Transformer,
        kv: KvCache,
        staging: Staging,
        *,
        scratch_block: int,
        max_running: int,
        max_context: int,
    ) -> None:
        self._model, self._kv, self._staging = model, kv, staging
        self._scratch_block = scratch_block
        self._sizes = graph_sizes(max_running)
        self._contexts = graph_contexts(max_context)
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._inputs = _static_inputs(self._sizes[-1], -(-max_context // kv.block_size), scratch_block, kv, model)
        self._hidden_SD = torch.empty(
            self._sizes[-1], model.spec.hidden_size, dtype=model.activation_dtype, device=model.device
        )

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first.

        Raises RuntimeError where the model waits for the device, which a graph cannot capture.
        """
        pool = torch.cuda.graph_pool_handle()
        for context in reversed(self._contexts):
            for size in reversed(self._sizes):
                batch = self._batch(size, context)
                self._rehearse(batch)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._hidden_SD[:size].copy_(self._model.hidden(batch, self._kv))
                self._captured[size, context] = _Captured(graph, batch)

    def takes(self, host: HostBatch) -> bool:
        """Return whether a graph exists for this step; there is none for tokens with adapters."""
        return host.decodes_only and host.adapter_T is None and self._key(host) in self._captured

    @torch.inference_mode()
    def run(self, host: HostBatch, sampled_L: Tensor | None) -> Tensor:
        """Replay the step's graph and return hidden_LD of the wanted rows; valid until the next run."""
        size, context = self._key(host)
        captured = self._captured[size, context]
        whole = padded(host, size, self._scratch_block, self._kv.block_size)
        own, into = captured.batch, self._staging.upload_into
        into(own.token_ids_T, whole.token_ids_T)
        put_pending(own.token_ids_T, whole, sampled_L, self._staging)
        into(own.positions_T, whole.positions_T)
        into(own.slots_T, whole.slots_T)
        if own.owner_T is not None:
            into(own.owner_T, whole.owner_T)
        into(own.context_len_S, whole.context_len_S)
        into(own.block_table_SB[:, : whole.block_table_SB.shape[1]], whole.block_table_SB)
        for ours, one in zip(own.further_tables, whole.further_tables, strict=True):
            into(ours.slots_T, one.slots_T)
            into(ours.block_table_SB[:, : one.block_table_SB.shape[1]], one.block_table_SB)
        captured.graph.replay()
        return self._hidden_SD[: len(host.wanted_rows_L)]

    def _key(self, host: HostBatch) -> tuple[int, int]:
        """Return the size and context of the smallest graph that holds the step; (0, 0) if there is none."""
        size = bisect.bisect_left(self._sizes, host.num_decode)
        context = bisect.bisect_left(self._contexts, host.max_context)
        if size == len(self._sizes) or context == len(self._contexts):
            return 0, 0
        return self._sizes[size], self._contexts[context]

    def _batch(self, size: int, context: int) -> Batch:
        """Return the first rows of the inputs that all graphs share."""
        whole = self._inputs
        return replace(
            whole,
            token_ids_T=whole.token_ids_T[:size],
            positions_T=whole.positions_T[:size],
            slots_T=whole.slots_T[:size],
            owner_T=None if whole.owner_T is None else whole.owner_T[:size],
            query_start_S1=whole.query_start_S1[: size + 1],
            context_len_S=whole.context_len_S[:size],
            block_table_SB=whole.block_table_SB[:size],
            wanted_rows_L=whole.wanted_rows_L[:size],
            num_decode=size,
            max_context=context,
            further_tables=tuple(
                GroupTable(one.slots_T[:size], one.block_table_SB[:size]) for one in whole.further_tables
            ),
        )

    def _rehearse(self, batch: Batch) -> None:
        """Run the model before a capture, on a side stream, as CUDA graphs require.

        This compiles kernels and grows tables. An operation that waits for the device fails here with its name, instead
        of during the capture.
        """
        before = torch.cuda.get_sync_debug_mode()
        current = torch.cuda.current_stream(self._model.device)
        side = torch.cuda.Stream(self._model.device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
            self._model.hidden(batch, self._kv)  # the first run may wait for one-time initialisation
            try:
                torch.cuda.set_sync_debug_mode("error")
                self._model.hidden(batch, self._kv)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        current.wait_stream(side)


def _static_inputs(rows: int, width: int, scratch_block: int, kv: KvCache, model: Transformer) -> Batch:
    """Return a batch of dummy rows, as many as the largest graph has."""

    def full(*shape: int, value: int, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=model.device)

    def table() -> GroupTable:
        slots_T = full(rows, value=scratch_block * kv.block_size, dtype=torch.int64)
        return GroupTable(slots_T, full(rows, width, value=scratch_block, dtype=torch.int32))

    first, *further = (table() for _ in range(kv.num_groups))
    return Batch(
        token_ids_T=full(rows, value=0, dtype=torch.int64),
        positions_T=full(rows, value=0, dtype=torch.int64),
        slots_T=first.slots_T,
        query_start_S1=torch.arange(rows + 1, dtype=torch.int32, device=model.device),
        context_len_S=full(rows, value=1, dtype=torch.int32),
        block_table_SB=first.block_table_SB,
        wanted_rows_L=torch.arange(rows, dtype=torch.int64, device=model.device),
        num_decode=rows,
        max_context=1,
        max_query=1,
        owner_T=None if model.expert_counter is None else full(rows, value=NO_TENANT, dtype=torch.int64),
        further_tables=tuple(further),
    )

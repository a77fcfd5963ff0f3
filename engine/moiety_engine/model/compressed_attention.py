"""Compressed attention: the layers of DeepSeek-V4.

T tokens, D model width, H heads of width d, R rank of the queries' latent row, G groups of heads, E closed windows,
I width of an index key.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.batch import CompressedCache, RecurrentStateCache
from moiety_kernels.compressed_attention import (
    Entries,
    TokenRuns,
    compressed_attention,
    pool_windows,
    update_history,
)
from moiety_kernels.head_linear import head_linear
from moiety_kernels.kv_store.caches import LayerCache
from moiety_kernels.lightning_indexer import select_tokens
from moiety_kernels.linear import linear
from moiety_kernels.paged_attention import paged_attention
from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters
from moiety_kernels.rms_norm import rms_norm
from moiety_kernels.rope import rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import Batch, Cache, RecurrentRows
    from moiety_engine.model.compressed_specs import CompressedAttentionSpec, EntryIndexerSpec, PoolSpec
    from moiety_engine.model.compressed_weights import CompressedAttentionWeights, EntryIndexerWeights, PoolWeights
    from moiety_engine.model.rotary import RotaryTable


class CompressedAttention:
    """Causal attention to a sliding window, and to one compressed entry for several tokens before it."""

    def __init__(
        self,
        spec: CompressedAttentionSpec,
        weights: CompressedAttentionWeights,
        rotary: RotaryTable,
        arithmetic: Arithmetic,
    ) -> None:
        self._spec, self._weights, self._rotary = spec, weights, rotary
        self._invariant = arithmetic.invariant
        self._linear = partial(linear, invariant=arithmetic.invariant)
        self._unit_d = torch.ones(spec.head_dim, device=rotary.device)
        self._parameters = AttentionParameters(spec.scale, spec.window, weights.sinks_H)
        self._entries: CompressedEntries | None = None
        if spec.pool is not None and weights.pool is not None:
            self._entries = CompressedEntries(spec, spec.pool, weights.pool, weights.indexer, rotary, arithmetic)

    def __call__(self, x_TD: Tensor, batch: Batch, cache: Cache) -> Tensor:
        spec, weights, rotate = self._spec, self._weights, Rotation(self._rotary, batch)
        latent_TR, row_Td = torch.split(self._linear(x_TD, weights.input_CD), [spec.query_rank, spec.head_dim], dim=1)
        latent_TR = rms_norm(latent_TR.contiguous(), weights.query_norm_R, spec.norm_eps)
        row_Td = rms_norm(row_Td.contiguous(), weights.row_norm_d, spec.norm_eps)
        row_Td = rotate(row_Td.unsqueeze(1)).squeeze(1)
        q_Xd = self._linear(latent_TR, weights.query_up_CR).view(-1, spec.head_dim)
        q_THd = rotate(rms_norm(q_Xd, self._unit_d, spec.norm_eps).view(-1, spec.num_heads, spec.head_dim))
        attend = self._attend_to_blocks if spec.rows_in_blocks else partial(self._attend, x_TD, latent_TR, rotate)
        out_THd = attend(q_THd, row_Td, batch, cache)
        by_group = rotate.back(out_THd).reshape(len(x_TD), spec.output_groups, -1)
        projected_TGR = head_linear(by_group, weights.group_GRI, invariant=self._invariant)
        return self._linear(projected_TGR.flatten(1), weights.output_DC)

    def _attend(
        self,
        x_TD: Tensor,
        latent_TR: Tensor,
        rotate: Rotation,
        q_THd: Tensor,
        row_Td: Tensor,
        batch: Batch,
        cache: Cache,
    ) -> Tensor:
        """Return the attention to the window in the sequence's state, which is advanced, and to its entries."""
        state = cache.state if isinstance(cache, CompressedCache) else cache
        assert isinstance(state, RecurrentStateCache)
        assert batch.states is not None, "layers with a state need its slots"
        runs, kept_TC = _runs(batch.states, batch.positions_T), [row_Td]
        entries: Entries | None = None
        if self._entries is not None:
            assert isinstance(cache, CompressedCache)
            kept_TC += self._entries.store_entries(x_TD, runs, batch, cache)
            entries = self._entries.select_entries(x_TD, latent_TR, rotate, batch, cache)
        window_NWd = state.parts[0]
        out_THd = compressed_attention(
            q_THd, row_Td, window_NWd, runs, entries, self._spec.scale, self._weights.sinks_H
        )
        update_history(row_Td, window_NWd, runs)
        state.record(batch.states, batch.positions_T.to(row_Td.dtype)[:, None], *kept_TC)
        return out_THd

    def _attend_to_blocks(self, q_THd: Tensor, row_Td: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Return the attention to the window, whose rows are in blocks, where the step's rows are stored first."""
        assert isinstance(cache, CompressedCache)
        rows_N1Pd = cache.entries_NEd.unsqueeze(1)
        cache.entries_NEd.flatten(0, 1).index_copy_(0, batch.slots_T, row_Td.to(rows_N1Pd.dtype))
        return paged_attention(q_THd, LayerCache(rows_N1Pd, rows_N1Pd), batch.attention, self._parameters)

    def replay(self, inputs_TC: Sequence[Tensor], rows: RecurrentRows, cache: RecurrentStateCache) -> None:
        """Keep the rows of tokens whose inputs were recorded; their entries are in blocks already."""
        position_T1, *kept_TC = inputs_TC
        runs = _runs(rows, position_T1.squeeze(1).long())
        for rows_TC, history_NwC in zip(kept_TC, cache.parts, strict=True):
            update_history(rows_TC, history_NwC, runs)


class CompressedEntries:
    """Compressed entries of one layer, which are pooled when their last token is computed, and their selection."""

    def __init__(
        self,
        spec: CompressedAttentionSpec,
        pool: PoolSpec,
        weights: PoolWeights,
        indexer: EntryIndexerWeights | None,
        rotary: RotaryTable,
        arithmetic: Arithmetic,
    ) -> None:
        self._pool, self._weights, self._rotary, self._eps = pool, weights, rotary, spec.norm_eps
        self._indexer: tuple[EntryIndexerSpec, EntryIndexerWeights] | None = None
        if pool.indexer is not None and indexer is not None:
            self._indexer = pool.indexer, indexer
        self._linear = partial(linear, invariant=arithmetic.invariant)

    def store_entries(self, x_TD: Tensor, runs: TokenRuns, batch: Batch, cache: CompressedCache) -> list[Tensor]:
        """Store the entries of the windows that end in the step, and their index keys, and advance the state.

        Returns the tokens' rows that the state keeps: those of entries, and of index keys.
        """
        rate = self._pool.rate
        token_E = (((batch.positions_T + 1) % rate == 0) & (batch.slots_T >= 0)).nonzero().squeeze(1)
        position_E = batch.positions_T.index_select(0, token_E)
        block_E, place_E = self._blocks(batch.slots_T.index_select(0, token_E), cache.block_size)
        entries = cache.entries_NEd.shape[1]
        kept = [(self._weights, cache.entries_NEd, cache.state.parts[1])]
        if self._indexer is not None:
            assert cache.index_keys_NEI is not None, "a layer with an indexer caches index keys"
            kept.append((self._indexer[1].pool, cache.index_keys_NEI, cache.state.parts[2]))
        all_rows = []
        for weights, stored_NEC, history_NwC in kept:
            rows_TC = self._linear(x_TD, weights.rows_CD)
            all_rows.append(rows_TC)
            pooled_EC = pool_windows(rows_TC, weights.bias_mC, history_NwC, runs, token_E, overlaps=self._pool.overlaps)
            update_history(rows_TC, history_NwC, runs)
            if len(token_E):
                pooled_EC = rms_norm(pooled_EC, weights.norm_C, self._eps)
                tables = self._rotary.upto(batch.max_context)
                rotated_EC = rope(pooled_EC.unsqueeze(1), *tables, position_E - rate + 1).squeeze(1)
                stored_NEC.flatten(0, 1).index_copy_(0, block_E * entries + place_E, rotated_EC.to(stored_NEC.dtype))
        return all_rows

    def select_entries(
        self, x_TD: Tensor, latent_TR: Tensor, rotate: Rotation, batch: Batch, cache: CompressedCache
    ) -> Entries | None:
        """Return the entries that each query attends to; None if no query sees any."""
        rate = self._pool.rate
        most = batch.max_context // rate
        if not most:
            return None
        count_T = ((batch.positions_T + 1) // rate).int()
        sequence_T = _owner(batch.query_start_S1, len(x_TD))
        skipped = max(1, rate // cache.block_size)  # blocks from one with an entry to the next
        table_TB = batch.block_table_SB[:, skipped - 1 :: skipped].index_select(0, sequence_T)
        if self._indexer is not None and most > self._indexer[0].top_k:
            assert cache.index_keys_NEI is not None
            spec, weights = self._indexer
            q_THI = self._linear(latent_TR, weights.query_up_CR).view(-1, spec.num_heads, spec.head_dim)
            exact_TD = x_TD if x_TD.dtype is torch.float32 else x_TD.float()
            factor = (spec.num_heads * spec.head_dim) ** -0.5
            starts_T1 = torch.arange(len(x_TD) + 1, dtype=torch.int32, device=x_TD.device)
            slot_TK, count_T = select_tokens(
                rotate(q_THI),
                self._linear(exact_TD, weights.head_weight_HD) * factor,
                cache.index_keys_NEI,
                # each query is a sequence of its own, of the entries that it sees
                AttentionMetadata(starts_T1, count_T, table_TB, 1, most, len(x_TD)),
                spec.top_k,
            )
            return Entries(cache.entries_NEd, slot_TK, count_T)
        entries = cache.entries_NEd.shape[1]
        entry_K = torch.arange(most, device=x_TD.device)
        slot_TK = table_TB.index_select(1, entry_K // entries) * entries + entry_K.int() % entries
        return Entries(cache.entries_NEd, slot_TK.contiguous(), count_T)

    def _blocks(self, slots_E: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Return the blocks of tokens in these slots, and the places in them of the entries that end there."""
        offset_E = slots_E % block_size
        place_E = (offset_E + 1) // self._pool.rate - 1 if self._pool.rate <= block_size else offset_E * 0
        return slots_E // block_size, place_E


class Rotation:
    """Rotary embedding of a batch's tokens, forward and back."""

    def __init__(self, rotary: RotaryTable, batch: Batch) -> None:
        tables = rotary.upto(batch.max_context)
        self._cos_TR, self._sin_TR = (table_PR.index_select(0, batch.positions_T) for table_PR in tables)
        self._row_T = torch.arange(len(batch.positions_T), device=batch.positions_T.device)

    def __call__(self, x_THd: Tensor) -> Tensor:
        """Return the heads, rotated by their tokens' positions."""
        return rope(x_THd, self._cos_TR, self._sin_TR, self._row_T)

    def back(self, x_THd: Tensor) -> Tensor:
        """Return the heads, rotated back."""
        return rope(x_THd, self._cos_TR, -self._sin_TR, self._row_T)


def _runs(rows: RecurrentRows, positions_T: Tensor) -> TokenRuns:
    run_T = _owner(rows.run_start_R1, len(positions_T))
    return TokenRuns(run_T.int(), positions_T, rows.run_start_R1, rows.slots_R)


def _owner(start_S1: Tensor, tokens: int) -> Tensor:
    """Return the index, int64, of each token's run or sequence among those that begin at `start_S1`."""
    token_T = torch.arange(tokens, dtype=start_S1.dtype, device=start_S1.device)
    return torch.searchsorted(start_S1, token_T, right=True) - 1

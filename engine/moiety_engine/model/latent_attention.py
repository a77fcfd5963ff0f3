"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form, for prefill and decode.

A query's unrotated part is projected into the latent space, where one cached row per position is the key of all heads
and its latent part the value; the attention output is projected back.

T tokens, D model width, C width of the first projections, Q the queries' part of C, H query heads, d width of a query
head, L width of a cache row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.context_parallel import mla_attention_over
from moiety_engine.model.indexer import Indexer
from moiety_engine.model.rotary import GrowthTable
from moiety_engine.model.shared_cache import share_rows
from moiety_kernels.head_linear import head_linear
from moiety_kernels.kv_store.caches import LatentCache
from moiety_kernels.latent_input import LatentInputPlan, latent_input, latent_queries
from moiety_kernels.linear import linear
from moiety_kernels.output_gate import output_gate
from moiety_kernels.rope.inputs import RotaryInputs
from moiety_kernels.scaled_sum import scale_rows
from moiety_kernels.sparse_mla_attention import sparse_mla_attention

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import Batch, Cache
    from moiety_engine.model.rotary import RotaryTable
    from moiety_engine.model.spec import LatentAttentionSpec
    from moiety_engine.model.weights import LatentAttentionWeights


class LatentAttention:
    """Causal latent attention with a paged cache of latent rows."""

    def __init__(
        self,
        spec: LatentAttentionSpec,
        weights: LatentAttentionWeights,
        rotary: RotaryTable,
        arithmetic: Arithmetic,
        context: RankCollectives,
        copies: RankCollectives,
    ) -> None:
        """Create the layer. `context`, `copies`: ranks that divide a sequence's positions, or have the same cache."""
        self._copies = copies
        self._spec, self._weights, self._rotary = spec, weights, rotary
        self._invariant = arithmetic.invariant
        self._linear = partial(linear, invariant=arithmetic.invariant)
        self._growth = (
            None if spec.query_growth is None else GrowthTable(spec.query_growth, weights.latent_norm_L.device)
        )
        self._plan = LatentInputPlan(weights.latent_norm_L, weights.query_norm, spec.norm_eps)
        self._mla_attention = mla_attention_over(context, spec.scale)
        self._indexer: Indexer | None = None
        if spec.indexer is not None and weights.indexer is not None:
            self._indexer = Indexer(spec.indexer, weights.indexer, rotary, arithmetic)

    def __call__(self, x_TD: Tensor, batch: Batch, cache: Cache) -> Tensor:
        assert isinstance(cache, LatentCache)
        spec, weights = self._spec, self._weights
        rotary = RotaryInputs(*self._rotary.upto(batch.max_context), batch.positions_T)
        input_TC = self._linear(x_TD, weights.input_CD, weights.input_bias_C)
        raw_TC = input_TC[:, : spec.query_input_width].clone() if spec.gated else None
        query_TQ = latent_input(input_TC, self._plan, rotary, cache, batch.slots_T)
        share_rows(self._copies, cache, batch.rank_slots)
        if self._indexer is not None:
            self._indexer.select(x_TD, query_TQ, batch, cache)
        if self._growth is not None:  # the projection is linear, so its input may be scaled in place of its output
            query_TQ = scale_rows(query_TQ, self._growth.upto(batch.max_context), batch.positions_T)
        if raw_TC is not None:
            query_TQ = torch.cat((query_TQ, raw_TC), dim=1)
        if weights.query_up is not None:
            query_TQ = self._linear(query_TQ, weights.query_up)
        heads = (query_TQ.shape[0], spec.num_heads, spec.head_dim)
        q_THd = query_TQ.as_strided(heads, (query_TQ.stride(0), spec.head_dim, 1))
        q_THL = latent_queries(q_THd, weights.key_up_HLd, rotary, invariant=self._invariant)
        out_THL = self._attend(q_THL, batch, cache)
        values_THd = head_linear(out_THL, weights.value_up_HdL, invariant=self._invariant)
        if spec.gated:
            gate_TC = query_TQ[:, spec.num_heads * spec.head_dim :].contiguous()
            values_THd = output_gate(values_THd, gate_TC, "sigmoid")
        if weights.gate_HD is not None:
            values_THd = output_gate(values_THd, self._linear(x_TD, weights.gate_HD), "sigmoid")
        return self._linear(values_THd.view(heads[0], -1), weights.output_DC, weights.output_bias_D)

    def _attend(self, q_THL: Tensor, batch: Batch, cache: LatentCache) -> Tensor:
        """Return out_THL, attention to all tokens or, if it is sparse, to the selected ones."""
        spec = self._spec
        if spec.indexer is not None:
            slot_TK, count_T = batch.selected.slot_TK, batch.selected.count_T
            assert slot_TK is not None and count_T is not None, "an indexer comes before its selection is used"
            return sparse_mla_attention(q_THL, cache, slot_TK, count_T, spec.scale, num_decode=batch.num_decode)
        return self._mla_attention(q_THL, cache, batch.attention)

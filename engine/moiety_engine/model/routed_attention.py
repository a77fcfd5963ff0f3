"""Attention whose query heads are those of routed experts (JetMoe, arXiv 2404.07413).

T tokens, D model width, K experts per token, G key-value heads, d head width, Q = G · d, H = G · K query heads of a
token. Head g · K + k is the k-th expert's query for key-value head g.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from moiety_kernels.attention_input import AttentionInputPlan, attention_input
from moiety_kernels.kv_store.caches import LayerCache
from moiety_kernels.linear import linear
from moiety_kernels.paged_attention import paged_attention
from moiety_kernels.paged_attention.inputs import AttentionParameters
from moiety_kernels.route import route
from moiety_kernels.routed_linear import routed_linear

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import Batch, Cache
    from moiety_engine.model.rotary import RotaryTable
    from moiety_engine.model.routed_attention_spec import RoutedAttentionSpec, RoutedAttentionWeights


class RoutedAttention:
    """Causal attention with a paged cache. Ranks of tensor parallelism divide the key-value heads of each expert."""

    def __init__(
        self,
        spec: RoutedAttentionSpec,
        weights: RoutedAttentionWeights,
        rotary: RotaryTable,
        norm_eps: float,
        arithmetic: Arithmetic,
        *,
        rounds: bool,
    ) -> None:
        """Create the layer. `rounds`: as in GroupedQueryAttention."""
        self._spec, self._weights, self._rotary = spec, weights, rotary
        self._linear = partial(linear, invariant=arithmetic.invariant)
        self._routed_linear = partial(routed_linear, invariant=arithmetic.invariant)
        self._parameters = AttentionParameters(spec.scale, spec.window, None, chunked=spec.chunked, rounds=rounds)
        self._plan = AttentionInputPlan(None, None, norm_eps, spec.clip)

    def __call__(self, x_TD: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Store the tokens' keys and values, and return the output, [T, D]."""
        assert isinstance(cache, LayerCache)
        spec, weights = self._spec, self._weights
        tokens, top_k = len(x_TD), spec.routing.top_k
        weight_TK, expert_TK = route(self._linear(x_TD, weights.router_ED), spec.routing)
        expert_R = expert_TK.flatten()
        query_RQ = self._routed_linear(x_TD.repeat_interleave(top_k, dim=0), weights.query_EQD, expert_R)
        query_THd = query_RQ.view(tokens, top_k, spec.num_kv_heads, spec.head_dim).transpose(1, 2)
        qkv_TC = torch.cat((query_THd.reshape(tokens, -1), self._linear(x_TD, weights.kv_CD)), dim=1)
        q_THd = attention_input(qkv_TC, self._plan, self._rotary.of_batch(batch), cache, batch.slots_T)
        out_THd = paged_attention(q_THd, cache, batch.attention, self._parameters)
        out_TKGd = out_THd.view(tokens, spec.num_kv_heads, top_k, spec.head_dim).transpose(1, 2)
        out_RQ = out_TKGd.reshape(tokens * top_k, spec.output_width)
        out_TKD = self._routed_linear(out_RQ, weights.output_EDQ, expert_R).view(tokens, top_k, -1)
        out_TKD = out_TKD * weight_TK.unsqueeze(2).to(out_TKD.dtype)
        sum_TD = weights.output_bias_D.to(out_TKD.dtype).expand_as(x_TD)
        for k in range(top_k):  # one by one, so that a token's bits do not depend on the number of tokens
            sum_TD = sum_TD + out_TKD[:, k]
        return sum_TD

"""Multi-head latent attention (DeepSeek-V2, 2405.04434) in its absorbed form, for prompts and decoding alike.

A query's unrotated part is taken into the latent space, where one cached row a position is the key of all heads and
its latent part the value; what attention gives is taken out of there again.

T tokens, D model width, H query heads, d width of a query head, L latent width, R rotated width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.batch import LatentCache
from moiety_kernels.head_linear import head_linear
from moiety_kernels.linear import linear
from moiety_kernels.mla_attention import mla_attention
from moiety_kernels.rms_norm import rms_norm
from moiety_kernels.rope import rope

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.batch import Batch, LayerCache
    from moiety_engine.model.rotary import RotaryTable
    from moiety_engine.model.spec import LatentAttentionSpec
    from moiety_engine.model.weights import LatentAttentionWeights


class LatentAttention:
    """Causal attention with a paged cache of latent rows."""

    def __init__(self, spec: LatentAttentionSpec, weights: LatentAttentionWeights, rotary: RotaryTable) -> None:
        self._spec, self._weights, self._rotary = spec, weights, rotary

    def __call__(self, x_TD: Tensor, batch: Batch, cache: LayerCache | LatentCache) -> Tensor:
        assert isinstance(cache, LatentCache)
        spec, weights = self._spec, self._weights
        widths = [spec.query_input_width, spec.latent_width, spec.rope.rotary_width]
        input_TC = linear(x_TD, weights.input_CD, weights.input_bias_C)
        query_input, latent_TL, rotated_TR = torch.split(input_TC, widths, dim=1)
        tables = *self._rotary.upto(batch.max_context), batch.positions_T
        latent_TL = rms_norm(latent_TL.contiguous(), weights.latent_norm_L, spec.norm_eps)
        rotated_TR = rope(rotated_TR.unsqueeze(1), *tables).squeeze(1)
        rows = cache.rows_NPL.flatten(0, 1)
        rows.index_copy_(0, batch.slots_T, torch.cat((latent_TL, rotated_TR), dim=1).to(rows.dtype))
        out_THL = mla_attention(
            self._queries(query_input, *tables),
            cache.rows_NPL,
            spec.latent_width,
            batch.query_start_S1,
            batch.context_len_S,
            batch.block_table_SB,
            spec.scale,
            num_decode=batch.num_decode,
            max_query=batch.max_query,
            max_context=batch.max_context,
        )
        values_THd = head_linear(out_THL, weights.value_up_HdL)
        return linear(values_THd.flatten(1), weights.output_DC, weights.output_bias_D)

    def _queries(self, query_input: Tensor, cos_PR: Tensor, sin_PR: Tensor, positions_T: Tensor) -> Tensor:
        """The queries as they meet the rows of the cache."""
        spec, weights = self._spec, self._weights
        if weights.query_norm is not None and weights.query_up is not None:
            query_input = linear(
                rms_norm(query_input.contiguous(), weights.query_norm, spec.norm_eps), weights.query_up
            )
        q_THd = query_input.reshape(-1, spec.num_heads, spec.head_dim)
        plain, rotated = torch.split(q_THd, [spec.nope_width, spec.rope.rotary_width], dim=2)
        absorbed_THL = head_linear(plain, weights.key_up_HLd)
        return torch.cat((absorbed_THL, rope(rotated, cos_PR, sin_PR, positions_T)), dim=2)

"""Lightning indexer of sparse attention (DeepSeek-V3.2): selection of the tokens that a layer's queries attend to.

T tokens, D model width, H index queries per token, I width of an index key, C width of the queries' latent row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from moiety_kernels.lightning_indexer import select_tokens, store_index_keys
from moiety_kernels.lightning_indexer.norm import IndexKeyNorm
from moiety_kernels.linear import linear
from moiety_kernels.rope import rope
from moiety_kernels.rope.inputs import RotaryInputs

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.attention_options import IndexerSpec
    from moiety_engine.model.batch import Batch
    from moiety_engine.model.rotary import RotaryTable
    from moiety_engine.model.weights import IndexerWeights
    from moiety_kernels.kv_store.caches import LatentCache

_NORM_EPS = 1e-6  # of index keys, in all released models


class Indexer:
    """Indexer of one layer. All ranks of a tensor-parallel group compute it whole, and so select the same tokens."""

    def __init__(self, spec: IndexerSpec, weights: IndexerWeights, rotary: RotaryTable, arithmetic: Arithmetic) -> None:
        self._spec, self._weights, self._rotary = spec, weights, rotary
        self._linear = partial(linear, invariant=arithmetic.invariant)
        norm = weights.key_norm
        assert norm.bias_D is not None, "a layer norm has a bias"
        self._key_norm = IndexKeyNorm(norm.weight_D, norm.bias_D, _NORM_EPS)
        self._scale = (spec.num_heads * spec.head_dim) ** -0.5

    def select(self, x_TD: Tensor, query_TC: Tensor, batch: Batch, cache: LatentCache) -> None:
        """Store the tokens' index keys, and write the selection of their queries to `batch.selected`.

        `query_TC`: the queries' normalized latent row.
        """
        spec, weights, keys_NPI = self._spec, self._weights, cache.index_keys_NPI
        assert keys_NPI is not None, "a layer with an indexer caches index keys"
        rotary = RotaryInputs(*self._rotary.upto(batch.max_context), batch.positions_T)
        key_TI = self._linear(x_TD, weights.key_ID)
        store_index_keys(key_TI, self._key_norm, rotary, keys_NPI, batch.slots_T)
        q_THI = self._linear(query_TC, weights.query_up_QC).view(-1, spec.num_heads, spec.head_dim)
        exact_TD = x_TD if x_TD.dtype is torch.float32 else x_TD.float()
        batch.selected.slot_TK, batch.selected.count_T = select_tokens(
            rope(q_THI, *rotary),
            self._linear(exact_TD, weights.head_weight_HD) * self._scale,
            keys_NPI,
            batch.attention,
            spec.top_k,
        )
